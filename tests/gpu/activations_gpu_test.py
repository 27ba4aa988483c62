"""Accuracy on what a trained model computes: operands of examples/train_lm.py's layers."""

import contextlib
import dataclasses
import functools
import importlib
import io
import pathlib
import sys
import tempfile
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import suite
from absl.testing import absltest, parameterized
from cases import Operands
from suites_gpu_test import KERNELS

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
STEPS, QUERIES = 60, 12


@functools.cache
def layers() -> list[tuple[Any, ...]]:
    """``q [S, H, D], kv [T, D], indices, topk_length`` of each layer, some queries of a window."""
    sys.path.insert(0, str(EXAMPLES))
    lm_config, lm_data, lm_model, lm_report, train_lm = (
        importlib.import_module(f"{name}")
        for name in ("lm_config", "lm_data", "lm_model", "lm_report", "train_lm")
    )
    c = dataclasses.replace(lm_config.PRESETS["gpu"], steps=STEPS, implementation="cutedsl")
    corpus = lm_data.load(None)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        log = lm_report.Log(pathlib.Path(folder))
        params = train_lm.train(c, "topk", 0, corpus, log)
    window = lm_data.validation_batches(corpus, c.batch, c.context)[0][:1, :-1].astype(np.int32)

    @jax.jit
    def run(params, window):
        params = jax.tree.map(lambda p: jnp.asarray(p, c.dtype), params)
        x, found = params["model"]["embed"][window], []
        for p, index_p in zip(params["model"]["layers"], params["indexer"], strict=True):
            normed = lm_model.norm(x)
            q, kv = lm_model.operands(p, normed, c)
            indices, length = lm_model.choose(lm_model.indexer(index_p, normed, c), None, c, "topk")
            found.append((q[0, rows], kv[0], indices[0, rows], length[0, rows]))
            options = {"c": c, "choice": "topk", "train_indexer": False, "recall": False}
            x, _ = lm_model.decoder_layer(p, index_p, x, None, **options)
        return found

    rows = np.linspace(10, c.context - 1, QUERIES).astype(int)
    return [(*jax.device_get(layer), c.scale) for layer in run(params, window)]


class Xla(suite.Suite):
    implementation = "xla"


class ActivationsTest(suite.Suite):
    locals().update(KERNELS)

    @parameterized.product(layer=(0, 1, 2, 3), dtype=KERNELS["dtypes"])
    def test_accuracy(self, layer: int, dtype: str):
        q, kv, indices, length, scale = layers()[layer]
        q, kv = (cases.as_dtype(x, dtype) for x in (q, kv))
        rng = np.random.default_rng(layer)
        dout = cases.as_dtype(rng.standard_normal((*q.shape[:2], 512)), dtype)
        dlse = rng.standard_normal(q.shape[:2]).astype(np.float32)
        operands = Operands(q, kv, indices, length, None)
        inputs = cases.Inputs(operands, dout, dlse, {"scale": scale})
        valid = np.arange(indices.shape[1]) < length[:, None]
        logits = np.einsum("shd,skd->shk", q.astype("f"), kv[indices].astype("f")) * scale
        spread = np.sqrt(np.mean([np.var(s[:, v]) for s, v in zip(logits, valid, strict=True)]))
        self.assertGreater(spread, 0.01)
        got, xla = self.evaluate(inputs), Xla().evaluate(inputs)
        values = oracle.forward(operands, scale=scale)
        grads = oracle.backward(operands, dout, dlse, scale=scale)
        limits = cases.bounds(dtype, float(spread))
        cases.check_close("out", got.out, values.out, limits.out)
        cases.check_lse(got.lse, values.lse, dtype, limits)
        cases.check_close("dkv", got.dkv, grads.dkv, limits.gradient)
        # Keys with a common part make dq ill-conditioned: Delta is that of a rounded out.
        bound = max(limits.gradient, 1.3 * cases.relative_l2(xla.dq, grads.dq))
        cases.check_close("dq", got.dq, grads.dq, bound)


if __name__ == "__main__":
    absltest.main()
