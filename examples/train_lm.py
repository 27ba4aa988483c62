"""Trains a byte-level language model with DeepSeek Sparse Attention on the Python standard library.

    python examples/train_lm.py                        # on a CPU, minutes
    python examples/train_lm.py --dense                # control: every query attends to all keys
    python examples/train_lm.py --indices random       # control: keys chosen by chance
    python examples/train_lm.py --preset gpu
    python examples/train_lm.py --mesh data=2,seq=2,heads=2

To 00_quickstart.py and 02_sharded.py it adds what chooses the indices: every layer's own lightning
indexer, trained beside the model. In the dense warm-up the model attends to all keys and the
indexer learns, by a KL divergence, where attention goes. Then the model attends to the K keys that
the indexer ranks highest, and the divergence is taken on these alone.

The model is in lm_model.py, its sizes in lm_config.py, the data in lm_data.py, what is written down
in lm_report.py.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import lm_data
import lm_model
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from lm_config import PRESETS, Config

try:
    import lm_report
    import optax
    import tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f"train_lm.py: {error}: pip install 'jax_dsa[examples]'") from error

MESH_AXES = ("data", "seq", "heads")
TRAIN_EVERY = 10  # steps between two lines of training metrics
VALIDATIONS = 5  # in a run


class Stage(NamedTuple):
    """What a step does: which keys are attended to (see lm_model), and if the indexer learns."""

    choice: str
    train_indexer: bool


class State(NamedTuple):
    params: Any  # lm_model.Params
    optimizer: optax.OptState


def stage(c: Config, control: str, step: int) -> Stage:
    """The schedule: a dense warm-up, then sparse training. The dense control never leaves it."""
    choice = "dense" if step < c.dense_steps else control
    return Stage(choice, train_indexer=control == "topk")


def optimizer(c: Config) -> optax.GradientTransformation:
    """AdamW, warm-up and cosine. Model and indexer share no gradient and are clipped apart."""
    peak, last = c.learning_rate, 0.05 * c.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, c.steps // 20), c.steps, last)
    parts = ("model", "indexer")
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))
    return optax.partition(dict.fromkeys(parts, adam), {name: name for name in parts})


def total_loss(params: lm_model.Params, windows, key, c: Config, stage: Stage):
    """Nats per byte plus the indexers' losses; and ``(bits per byte, indexers' losses)``."""
    bits, report = lm_model.loss(params, windows, key, c, *stage)
    return bits * math.log(2) + report["index_loss"], (bits, report["index_loss"])


def train_step(state: State, windows, key, c: Config, stage: Stage):
    gradients, losses = jax.grad(total_loss, has_aux=True)(state.params, windows, key, c, stage)
    updates, optimizer_state = optimizer(c).update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state), losses


def put(tree: Any, *axes: str, mesh: Mesh | None) -> Any:
    """Places arrays: leading dimensions split over mesh axes, the others on every device."""
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
    return jax.device_put(tree, sharding)


def compile_steps(example, c: Config, stages: list[Stage], mesh: Mesh | None):
    """One program a stage, compiled ahead, so that tokens per second count training alone."""
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    step = jax.jit(train_step, static_argnums=(3, 4), donate_argnums=0, out_shardings=replicated)
    return {s: step.lower(*example, c, s).compile() for s in dict.fromkeys(stages)}


def validator(c: Config, control: str, batches) -> Callable[..., dict[str, Any]]:
    """A function of parameters and key: means over the validation set, with the control's keys."""
    loss = functools.partial(lm_model.loss, c=c, choice=control, recall=control != "dense")
    evaluate = jax.jit(loss)

    def validate(params: lm_model.Params, key: jax.Array) -> dict[str, Any]:
        results = [evaluate(params, b, jax.random.fold_in(key, i)) for i, b in enumerate(batches)]
        bits, reports = zip(*jax.device_get(results), strict=True)
        recall = float(np.mean([r["recall"] for r in reports]))
        return {
            "bits_per_byte": float(np.mean(bits)),
            "recall": None if control == "dense" else recall,
        }

    return validate


def train(
    c: Config,
    control: str,
    seed: int,
    corpus: lm_data.Corpus,
    log: lm_report.Log,
    mesh: Mesh | None = None,
) -> lm_model.Params:
    """Trains from the seed's random parameters, writes metrics to ``log``, returns parameters."""
    place = functools.partial(put, mesh=mesh)
    params = lm_model.init(c, seed)
    state = place(State(params, optimizer(c).init(params)))
    windows = lm_data.training_batches(corpus, c.batch, c.context, seed)
    held_out = lm_data.validation_batches(corpus, c.batch, c.context)
    validate = validator(c, control, [place(b, "data") for b in held_out])
    keys = [place(k) for k in jax.random.split(jax.random.key(seed), c.steps)]
    stages = [stage(c, control, i) for i in range(c.steps)]
    example = (state, place(next(windows), "data"), keys[0])
    steps = compile_steps(example, c, stages, mesh)
    meter = lm_report.Meter(c.batch * c.context)
    progress = tqdm.trange(1, c.steps + 1, desc=f"{control}, seed {seed}", unit="step")
    for number, now, key in zip(progress, stages, keys, strict=True):
        state, losses = steps[now](state, place(next(windows), "data"), key)
        meter.add(losses)
        validates = number * VALIDATIONS // c.steps > (number - 1) * VALIDATIONS // c.steps
        if number % TRAIN_EVERY == 0 or number == c.dense_steps or validates:
            metrics = meter.read()
            metrics |= {} if now.train_indexer else {"index_loss": None}
            log.write("train", step=number, choice=now.choice, **metrics)
            progress.set_postfix(bits=metrics["bits_per_byte"], keys=now.choice)
            if validates:
                log.write("validation", step=number, **validate(state.params, key))
            meter.start()
    return state.params


def make_mesh(text: str) -> Mesh:
    """A mesh from ``data=2,seq=2,heads=2``; an axis that is not named has size 1.

    Raises:
        argparse.ArgumentTypeError: another text, or more devices than there are.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    for item in text.split(","):
        name, _, size = item.partition("=")
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"got {text!r}, want data=N,seq=N,heads=N, N >= 1")
        sizes[name] = int(size)
    wanted = math.prod(sizes.values())
    if wanted > jax.device_count():
        raise argparse.ArgumentTypeError(
            f"{text!r} takes {wanted} devices, there are {jax.device_count()}; a CPU plays more "
            f"with XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want an integer of at least 1")
    return int(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="cpu", help="sizes; tiny only shows a run")
    control = parser.add_mutually_exclusive_group()
    control.add_argument("--indices", choices=("topk", "random"), default="topk")
    control.add_argument("--dense", action="store_true", help="attend to all keys")
    add("--steps", type=positive, help="default: the preset's")
    add("--seed", type=int, default=0, help="of parameters, batches and random keys")
    add("--data", metavar="DIR", help="Python sources to learn; default: the standard library")
    add("--out", metavar="DIR", help="of metrics.jsonl and training.png; default: runs/NAME")
    add("--implementation", help="of sparse_attention; default: its own choice")
    add("--mesh", type=make_mesh, metavar="data=N,seq=N,heads=N", help="train on several devices")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, began = parse(argv), time.perf_counter()
    c = PRESETS[args.preset]
    c = dataclasses.replace(c, steps=args.steps or c.steps, implementation=args.implementation)
    control = "dense" if args.dense else args.indices
    name = f"{args.preset}-{control}-seed{args.seed}"
    try:
        corpus = lm_data.load(args.data)
    except FileNotFoundError as error:
        raise SystemExit(f"train_lm.py: {error}") from error
    unigram = lm_data.unigram_bits(corpus)
    log = lm_report.Log(pathlib.Path(args.out or f"runs/{name}"))
    log.write(
        "start",
        control=control,
        seed=args.seed,
        **dataclasses.asdict(c),
        unigram_bits_per_byte=unigram,
        validation_bytes=corpus.validation[:, 1:].size,
    )
    with jax.set_mesh(args.mesh) if args.mesh else contextlib.nullcontext():
        train(c, control, args.seed, corpus, log, args.mesh)
    bits = log.series("validation", "bits_per_byte")[1][-1]
    log.write("end", step=c.steps, bits_per_byte=bits, seconds=time.perf_counter() - began)
    picture = lm_report.plot(log, name)
    print(f"validation: {bits:.3f} bits per byte; a unigram model: {unigram:.3f}")
    print(f"{log.path}\n{picture}")


if __name__ == "__main__":
    main()
