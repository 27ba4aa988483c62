"""The whole path but silicon: what the shared code and the bridge make of kernels in NumPy."""

from unittest import mock

import cases
import jax
import numpy_kernels
import recording
from absl.testing import absltest, parameterized
from cases import Case

import jax_dsa
from jax_dsa import dispatch
from jax_dsa.ffi import call, library


class Bridged:
    """An implementation that makes the kernels' calls on a CPU."""

    @staticmethod
    def forward(facts, platform, *operands):
        return call.forward(facts, *operands)

    @staticmethod
    def backward(facts, platform, *operands):
        return call.backward(facts, *operands)


BRIDGED = (
    Case("plain", head_dim=512, topk=6, queries=3, keys=11),
    Case("everything", batch=(2,), head_dim=576, queries=5, lengths=cases.RAGGED, sink=cases.SINKS),
    Case("many_heads", head_dim=576, queries=2, heads=70, sink=(0.5, -1.0), scale=0.01),
)


class WholePathTest(parameterized.TestCase):
    """Validation, vjp, batching, lowering, decoding, packing, launch; kernels in NumPy float64."""

    def run_case(self, case: Case, dtype: str):
        inputs = cases.make_inputs(case, dtype)
        driver = recording.Driver(numpy_kernels.entries(case.head_dim, dtype))
        driver.on_launch = numpy_kernels.Run(case.head_dim, dtype)
        library.register()
        self.enter_context(mock.patch.dict(dispatch._MODULES, {"xla": Bridged}))
        self.enter_context(driver)
        library.install([(e, e.symbol.encode()) for e in driver.entries.values()])
        q, kv, indices, length, sink = inputs.operands

        def run(q, kv, sink, dout, dlse):
            def fn(q, kv, sink):
                return jax_dsa.sparse_attention(
                    q, kv, indices, topk_length=length, attn_sink=sink, return_lse=True,
                    implementation="xla", **case.options,
                )  # fmt: skip

            results, vjp = jax.vjp(fn, q, kv, sink)
            return *results, *vjp((dout, dlse))

        got = jax.jit(run)(q, kv, sink, inputs.dout, inputs.dlse)
        cases.check_results(jax.block_until_ready(got), inputs, dtype, case.logit_std)
        self.assertEqual([x.symbol.split("_")[0] for x in driver.launches], ["forward", "backward"])

    @parameterized.product(case=BRIDGED, dtype=("bfloat16", "float16"))
    def test_values_and_gradients(self, case: Case, dtype: str):
        jax.clear_caches()
        self.run_case(case, dtype)


if __name__ == "__main__":
    absltest.main()
