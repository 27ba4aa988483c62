"""Kernels inside XLA programs: memory, command buffers, remat, export, host time, faults."""

import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import suite
from absl.testing import absltest, parameterized
from cases import Case
from jax.profiler import ProfileData
from suites_gpu_test import KERNELS

import jax_dsa
from jax_dsa.bench import programs, timing

attend = functools.partial(jax_dsa.sparse_attention, implementation="cutedsl", return_lse=True)


def operands(batch=(), queries=64, keys=4096, heads=64, topk=128, dtype="bfloat16"):
    keys_ = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys_[0], (*batch, queries, heads, 576), jnp.dtype(dtype))
    kv = jax.random.normal(keys_[1], (*batch, keys, 576), jnp.dtype(dtype))
    indices = jax.random.randint(keys_[2], (*batch, queries, topk), 0, keys, jnp.int32)
    dout = jax.random.normal(keys_[3], (*batch, queries, heads, 512), jnp.dtype(dtype))
    return q, kv, indices, dout


def gradient(q, kv, indices, dout):
    (out, lse), vjp = jax.vjp(lambda q, kv: attend(q, kv, indices), q, kv)
    return out, *vjp((dout, jnp.zeros_like(lse)))


class MemoryTest(parameterized.TestCase):
    @parameterized.parameters(None, 3)
    def test_temporaries_of_the_backward_pass(self, batch: int | None):
        """At most 4 T D + 12 S H bytes an element, and 1 MiB."""
        q, kv, indices, dout = operands()
        out, lse = jax.jit(attend)(q, kv, indices)
        facts = programs.Shape(64, 4096, 64, 128).problem("bfloat16").facts
        run = programs.backward("cutedsl", facts)
        args = (q, kv, indices, out, lse, dout)
        if batch:
            run, args = jax.vmap(run), [jnp.stack([x] * batch) for x in args]
        memory = jax.jit(run).lower(*args).compile().memory_analysis()
        assert memory is not None
        limit = (batch or 1) * (4 * 4096 * 576 + 12 * 64 * 64) + 2**20
        self.assertLessEqual(memory.temp_size_in_bytes, limit)


REMAT = """
import sys, jax, jax.numpy as jnp
import jax_dsa
import programs_gpu_test as p
from jax_dsa.ffi import library
q, kv, indices, _ = p.operands()
def layer(q, kv):
    out, lse = p.attend(jnp.sin(q), jnp.sin(kv), indices)
    return jnp.pad(out, ((0, 0), (0, 0), (0, 64))) * lse[..., None].astype(q.dtype)
def loss(q, kv):
    body = jax.checkpoint(layer, policy=eval(sys.argv[1]))
    return jax.lax.scan(lambda q, kv: (body(q, kv), None), q, kv)[0].astype("f").sum()
grad = jax.jit(jax.grad(loss, (0, 1)))
args = q, jnp.stack([kv] * 2)
jax.block_until_ready(grad(*args))
before = library.launch_count()
jax.block_until_ready(grad(*args))
print("launched", library.launch_count() - before)
"""


def run_alone(code: str, flags: str, *arguments: str) -> int:
    """The number that ends what a program prints, run with these XLA flags."""
    environment = dict(os.environ, XLA_FLAGS=flags)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    if run.returncode:
        raise AssertionError(run.stderr[-3000:])
    return int(run.stdout.split()[-1])


class RematTest(parameterized.TestCase):
    """Kernels that run in the gradient of two checkpointed layers, a loop.

    As a loop the passes are computations of their own: elsewhere XLA could see that a forward
    kernel run again gives what it gave before.
    """

    @parameterized.parameters(("jax_dsa.checkpoint_policy", 4), ("None", 6))
    def test_forward_runs_again_only_without_the_policy(self, policy: str, launches: int):
        flags = "--xla_gpu_enable_command_buffer="
        self.assertEqual(run_alone(REMAT, flags, policy), launches)


COMMAND_BUFFERS = """
import jax, numpy as np
import programs_gpu_test as p
from jax_dsa.ffi import library
args = p.operands()
run = jax.jit(p.gradient)
donating = jax.jit(p.gradient, donate_argnums=(0, 3))
first = jax.device_get(run(*args))
def same(results):
    for name, got, want in zip(("out", "dq", "dkv"), results, first):
        got, want = (np.asarray(x).astype("f") for x in (got, want))
        if name == "dkv":
            np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-2)
        else:
            np.testing.assert_array_equal(got, want)
for _ in range(3):
    same(run(*args))
before = library.launch_count()
for _ in range(10):
    same(run(*args))
entered = library.launch_count() - before
for _ in range(10):
    q, kv, indices, dout = args
    same(donating(q.copy(), kv, indices, dout.copy()))
print("entered", entered)
"""


class CommandBufferTest(parameterized.TestCase):
    """How often ten calls enter the handlers, after the first three."""

    def test_captured_calls_are_replayed_without_the_host(self):
        flags = (
            "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
        )
        self.assertEqual(run_alone(COMMAND_BUFFERS, flags), 0)

    def test_without_command_buffers_each_call_enters_the_handlers(self):
        self.assertEqual(run_alone(COMMAND_BUFFERS, "--xla_gpu_enable_command_buffer="), 20)


class ExportTest(parameterized.TestCase):
    def test_round_trip(self):
        args = operands()
        exported = jax.export.export(
            jax.jit(gradient), disabled_checks=jax_dsa.EXPORT_DISABLED_CHECKS
        )(*args)
        again = jax.export.deserialize(exported.serialize())
        for got, want in zip(again.call(*args)[:2], jax.jit(gradient)(*args)[:2], strict=True):
            np.testing.assert_array_equal(got, want)

    def test_exported_on_a_host_without_a_gpu(self):
        code = (
            "import sys, jax, jax_dsa, programs_gpu_test as p\n"
            "shapes = jax.eval_shape(p.operands)\n"
            "e = jax.export.export(jax.jit(p.gradient), platforms=['cuda'],"
            " disabled_checks=jax_dsa.EXPORT_DISABLED_CHECKS)(*shapes)\n"
            "sys.stdout.buffer.write(e.serialize())"
        )
        environment = dict(os.environ, JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        data = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, env=environment
        ).stdout
        jax_dsa.register()
        args = operands()
        got = jax.export.deserialize(bytearray(data)).call(*args)
        for a, b in zip(got[:2], jax.jit(gradient)(*args)[:2], strict=True):
            np.testing.assert_array_equal(a, b)


def host_time(run, args, calls: int = 300) -> float:
    """Seconds of host work for an asynchronous call: the least of ten means."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(calls):
            results = run(*args)
        times.append((time.perf_counter() - start) / calls)
        jax.block_until_ready(results)
    return min(times)


def launches(run, args) -> int:
    """Kernels and fills of one call on the device."""
    jax.block_until_ready(run(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*args))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return len(list(timing._kernels(ProfileData.from_file(str(path)))))


class HostTimeTest(parameterized.TestCase):
    """Beyond an XLA program of as many operands and results that does nothing."""

    def test_forward_and_backward(self):
        q, kv, indices, dout = operands(queries=1, keys=64, heads=1, topk=1)
        out, lse = jax.jit(attend)(q, kv, indices)
        no_op = jax.jit(lambda q, kv, i: (q[..., :512], lse + 0))
        added = host_time(jax.jit(attend), (q, kv, indices)) - host_time(no_op, (q, kv, indices))
        facts = programs.Shape(1, 64, 1, 1).problem("bfloat16").facts
        args = (q, kv, indices, out, lse, dout)
        no_op = jax.jit(lambda q, kv, *_: (q + 1, kv + 1))
        run = jax.jit(programs.backward("cutedsl", facts))
        backward, count = host_time(run, args) - host_time(no_op, args), launches(run, args)
        print(
            f"host time beyond a no-op: forward {added * 1e6:.1f} us, backward"
            f" {backward * 1e6:.1f} us with {count} launches"
        )
        self.assertLessEqual(added, 10e-6)
        self.assertLessEqual(backward, 6e-6 + 3e-6 * count)

    def test_second_call_neither_traces_nor_compiles(self):
        run, args = jax.jit(gradient), operands()
        run(*args)
        with jax.log_compiles(), self.assertNoLogs("jax", "WARNING"):
            run(*args)


class RefusalTest(suite.Suite):
    locals().update(KERNELS)

    @parameterized.parameters((64, "bfloat16"), (576, "float32"))
    def test_unsupported_problems_say_what_is_supported(self, width: int, dtype: str):
        inputs = cases.make_inputs(Case("no", head_dim=width), dtype)
        with self.assertRaisesRegex(NotImplementedError, "512.*576|bfloat16.*float16"):
            self.evaluate(inputs)

    def test_deterministic_gradient_names_xla(self):
        inputs = self.inputs(Case("deterministic"))
        with self.assertRaisesRegex(NotImplementedError, "xla"):
            self.evaluate(inputs, jax.jit(self.program({"deterministic": True})))


if __name__ == "__main__":
    absltest.main()
