"""The examples run as a newcomer runs them, and train_lm.py does what its text says."""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import jax_dsa

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
lm_config, lm_data, lm_model, train_lm = (
    importlib.import_module(name) for name in ("lm_config", "lm_data", "lm_model", "train_lm")
)
TINY = lm_config.PRESETS["tiny"]


def setUpModule():
    # The programs here are tiny and run a few times: most of their time is compilation.
    jax.config.update("jax_disable_most_optimizations", True)


def tearDownModule():
    jax.config.update("jax_disable_most_optimizations", False)


def run(name: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@functools.cache
def train(*flags: str) -> list[dict]:
    """The events of a run of the tiny preset."""
    with tempfile.TemporaryDirectory() as out:
        train_lm.main(["--preset", "tiny", "--out", out, *flags])
        picture = pathlib.Path(out, "training.png").read_bytes()
        assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000, picture[:8]
        return [json.loads(x) for x in pathlib.Path(out, "metrics.jsonl").read_text().splitlines()]


def of_kind(events: list[dict], kind: str) -> list[dict]:
    return [e for e in events if e["event"] == kind]


class ScriptsTest(parameterized.TestCase):
    @parameterized.parameters("00_quickstart.py", "02_sharded.py")
    def test_runs(self, name):
        done = run(name)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotEmpty(done.stdout)

    def test_quickstart_has_fewer_than_30_lines(self):
        self.assertLess(len((EXAMPLES / "00_quickstart.py").read_text().splitlines()), 30)

    def test_missing_sources_name_the_flag(self):
        with tempfile.TemporaryDirectory() as empty:
            done = run("train_lm.py", "--data", empty)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--data DIR", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    @parameterized.parameters("optax", "tqdm", "matplotlib")
    def test_missing_package_names_the_extra(self, package):
        # None in sys.modules: an import of the name fails as if the package were not there.
        start = f"import sys, runpy; sys.path.insert(0, {str(EXAMPLES)!r}); "
        start += f"sys.modules[{package!r}] = None; runpy.run_path('train_lm.py')"
        done = subprocess.run(
            [sys.executable, "-c", start], cwd=EXAMPLES, capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("jax_dsa[examples]", done.stderr)
        self.assertIn(package, done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    @parameterized.parameters("--mesh=rows=2", "--mesh=data=0", "--mesh=data", "--steps=0")
    def test_wrong_flag_says_what_is_wanted(self, flag):
        stderr = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(stderr):
            train_lm.parse([flag])
        self.assertRegex(stderr.getvalue(), "got .*, want")

    def test_too_large_a_mesh_names_the_flag_that_adds_devices(self):
        stderr = io.StringIO()
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(stderr):
            train_lm.parse(["--mesh", "data=4096"])
        self.assertIn("xla_force_host_platform_device_count=4096", stderr.getvalue())


class RunsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("topk", (), ["dense", "topk"]),
        ("random", ("--indices", "random"), ["dense", "random"]),
        ("dense", ("--dense",), ["dense"]),
    )
    def test_events(self, flags, choices):
        events = train(*flags)
        start, end = events[0], events[-1]
        self.assertEqual((start["event"], end["event"]), ("start", "end"))
        self.assertGreaterEqual(start["validation_bytes"], 50_000)
        trained, validated = of_kind(events, "train"), of_kind(events, "validation")
        self.assertEqual(list(dict.fromkeys(e["choice"] for e in trained)), choices)
        self.assertEqual(trained[-1]["step"], TINY.steps)
        for e in trained:
            self.assertGreater(e["tokens_per_second"], 0)
            self.assertEqual(e["index_loss"] is not None, "topk" in choices)
        for e in validated:
            self.assertEqual(e["recall"] is None, choices == ["dense"])
        self.assertLess(trained[-1]["bits_per_byte"], trained[0]["bits_per_byte"] - 0.5)
        self.assertLess(validated[-1]["bits_per_byte"], validated[0]["bits_per_byte"] - 0.5)
        self.assertEqual(end["bits_per_byte"], validated[-1]["bits_per_byte"])
        self.assertGreater(end["seconds"], 0)

    def test_on_a_mesh_as_on_one_device(self):
        split, whole = train("--mesh", "data=2,seq=2,heads=2"), train()
        for kind, fields in (
            ("train", ["bits_per_byte", "index_loss"]),
            ("validation", ["bits_per_byte", "recall"]),
        ):
            got, want = ([[e[f] for f in fields] for e in of_kind(x, kind)] for x in (split, whole))
            np.testing.assert_allclose(got, want, rtol=1e-4)


class ModelTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.c = dataclasses.replace(TINY, layers=2, context=24, topk=4)
        self.params = lm_model.init(self.c, seed=0)
        random = np.random.default_rng(0)
        self.windows = random.integers(0, 256, (2, self.c.context + 1)).astype(np.uint8)
        self.key = jax.random.key(0)

    @parameterized.parameters(("dense", 1), ("topk", 2))
    def test_model_and_indexer_share_no_gradient(self, choice, layers):
        c = dataclasses.replace(self.c, layers=layers)

        def losses(params):
            bits, report = lm_model.loss(params, self.windows, self.key, c, choice, True)
            return {"model": bits, "indexer": report["index_loss"]}

        by_loss = jax.jit(jax.jacrev(losses))(lm_model.init(c, seed=0))
        for loss, gradients in by_loss.items():
            for part, tree in gradients.items():
                for path, g in jax.tree.leaves_with_path(tree):
                    name = f"{loss} loss, {part}{jax.tree_util.keystr(path)}"
                    self.assertEqual(bool(np.any(g)), loss == part, name)

    @parameterized.parameters(*lm_model.CHOICES)
    def test_no_byte_is_predicted_from_later_ones(self, choice):
        def predict(inputs):
            return lm_model.predict(self.params, inputs, self.key, self.c, choice)[0]

        inputs = self.windows[:, :-1].astype(np.int32)
        changed = np.concatenate([inputs[:, :12], (inputs[:, 12:] + 1) % 256], 1)
        before, after = (jax.jit(predict)(x) for x in (inputs, changed))
        np.testing.assert_allclose(before[:, :12], after[:, :12], rtol=1e-5, atol=1e-5)
        self.assertGreater(np.abs(before - after)[:, 12:].max(-1).min(), 1e-3)

    def test_dense_choice_is_causal_attention(self):
        random = np.random.default_rng(0)
        q, kv = random.normal(size=(2, 9, 3, 8)), random.normal(size=(2, 9, 8))
        indices, length = lm_model.choose((None, kv), self.key, self.c, "dense")
        got = jax_dsa.sparse_attention(
            q.astype(np.float32), kv.astype(np.float32), indices, topk_length=length, scale=0.5
        )
        p = np.exp(0.5 * np.einsum("bshd,btd->bsht", q, kv)) * np.tri(9)[:, None]
        want = np.einsum("bsht,btd->bshd", p / p.sum(-1, keepdims=True), kv)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    def test_random_keys_are_distinct_causal_and_fresh(self):
        draw = jax.jit(functools.partial(lm_model.random_candidates, batch=2, context=24, topk=4))
        indices, length = jax.device_get(draw(self.key))
        self.assertEqual(indices.dtype, np.int32)
        for batch, query in np.ndindex(2, 24):
            chosen = indices[batch, query, : length[batch, query]].tolist()
            self.assertLen(set(chosen), min(query + 1, 4))
            self.assertLen(chosen, min(query + 1, 4))
            self.assertContainsSubset(chosen, range(query + 1))
        again, _ = jax.device_get(draw(jax.random.key(1)))
        self.assertGreater(np.mean(indices[:, 8:] != again[:, 8:]), 0.5)
        self.assertGreater(np.mean(indices[0, 8:] != indices[1, 8:]), 0.5)

    def test_random_keys_are_uniform(self):
        draw = functools.partial(lm_model.random_candidates, batch=500, context=10, topk=4)
        indices, _ = jax.device_get(jax.jit(draw)(self.key))
        share = np.bincount(indices[:, 9].ravel(), minlength=10) / 500
        np.testing.assert_allclose(share, 0.4, atol=5 * (0.4 * 0.6 / 500) ** 0.5)

    def test_recall_counts_the_keys_with_most_attention(self):
        random = np.random.default_rng(0)
        q = random.normal(size=(2, 24, 3, 8)).astype(np.float32)
        kv = random.normal(size=(2, 24, 8)).astype(np.float32)
        p = np.exp(self.c.scale * np.einsum("bshd,btd->bsht", q, kv)) * np.tri(24)[:, None]
        order = np.argsort(-(p / p.sum(-1, keepdims=True)).sum(2), axis=-1)
        best, half, worst = order[..., :4], order[..., 2:6], order[..., -4:]
        for indices, share in ((best, 1.0), (half, 0.5), (worst, 0.0)):
            got = lm_model.dense_recall(jnp.asarray(q), jnp.asarray(kv), indices, self.c)
            self.assertAlmostEqual(float(got), share, places=6)

    def test_remat_changes_no_gradient(self):
        def gradient(c):
            bits = lambda p: lm_model.loss(p, self.windows, self.key, c, "dense")[0]  # noqa: E731
            return jax.jit(jax.grad(bits))(lm_model.init(c, seed=0))

        c = dataclasses.replace(self.c, layers=1)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, gradient(dataclasses.replace(c, remat=True)), gradient(c))


class DataTest(parameterized.TestCase):
    def corpus(self, files: int = 60) -> tuple[dict[str, bytes], pathlib.Path]:
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        texts = {f"{i}.py": bytes([i]) * 20_000 for i in range(files)}
        for name, text in texts.items():
            (root / name).write_bytes(text)
        (root / "site-packages").mkdir()
        (root / "site-packages" / "other.py").write_bytes(b"\xff" * 20_000)
        (root / "notes.txt").write_bytes(b"\xfe" * 20_000)
        return texts, root

    def test_no_file_is_in_both_parts(self):
        texts, root = self.corpus(120)
        corpus = lm_data.load(str(root))
        held_out = set(np.unique(corpus.validation).tolist())
        train = set(np.unique(corpus.train).tolist())
        self.assertGreaterEqual(len(held_out), 2)
        self.assertEmpty(held_out & train)
        self.assertContainsSubset(held_out | train, range(len(texts)))
        np.testing.assert_array_equal(corpus.validation, lm_data.load(str(root)).validation)

    @parameterized.parameters((64, 8), (256, 4), (8192, 1))
    def test_every_validation_byte_is_predicted_once(self, context, batch):
        pieces = np.random.default_rng(0).integers(0, 256, (8, 8193)).astype(np.uint8)
        batches = lm_data.validation_batches(lm_data.Corpus(pieces[0], pieces), batch, context)
        self.assertEqual(batches.shape[1:], (batch, context + 1))
        np.testing.assert_array_equal(batches[..., 1:].reshape(8, -1), pieces[:, 1:])
        np.testing.assert_array_equal(batches[..., :-1].reshape(8, -1), pieces[:, :-1])

    def test_validation_that_does_not_divide(self):
        corpus = lm_data.Corpus(np.zeros(9, np.uint8), np.zeros((8, 8193), np.uint8))
        with self.assertRaisesRegex(ValueError, "got 4 windows of 100 bytes, want"):
            lm_data.validation_batches(corpus, 4, 100)

    def test_training_batches_depend_on_the_seed_alone(self):
        corpus = lm_data.Corpus(np.arange(200, dtype=np.uint8), np.zeros((8, 8193), np.uint8))
        first, again, other = (
            next(lm_data.training_batches(corpus, 3, 16, seed)) for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(first, again)
        self.assertFalse(np.array_equal(first, other))
        np.testing.assert_array_equal(np.diff(first.astype(int)), 1)  # windows of the text

    def test_unigram_bits(self):
        text = np.repeat(np.arange(4, dtype=np.uint8), 100_000)
        corpus = lm_data.Corpus(text, np.zeros((8, 8193), np.uint8))
        self.assertAlmostEqual(lm_data.unigram_bits(corpus), 2.0, places=2)


if __name__ == "__main__":
    absltest.main()
