"""The oracle itself: against central finite differences and closed forms."""

import numpy as np
import oracle
from absl.testing import absltest, parameterized
from cases import Case, Operands, make_inputs

SINKS = {
    "none": None,
    "moderate": (0.5, -1.0, 2.0),
    "forty": (40.0, -40.0, 0.0),
    "huge": (1e38, -1e38, 0.3),
    "infinite": (np.inf, -np.inf, 0.3),
}


def loss(operands, inputs) -> float:
    """``sum(dout out) + sum(dlse lse)`` over rows that have an lse."""
    values = oracle.forward(operands, **inputs.options)
    lse = np.where(np.isfinite(values.lse), values.lse, 0)
    return float((inputs.dout * values.out).sum() + (inputs.dlse * lse).sum())


def difference_quotients(operands: Operands, inputs, field: str, step: float = 1e-5):
    x = getattr(operands, field)
    grads = np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[at] += sign * step
            ends.append(loss(operands._replace(**{field: moved}), inputs))
        grads[at] = (ends[0] - ends[1]) / (2 * step)
    return grads


class OracleTest(parameterized.TestCase):
    @parameterized.named_parameters(*SINKS.items())
    def test_gradients_match_finite_differences(self, sinks):
        """Duplicates, invalid slots, empty rows, value_dim < D, cotangents of out and lse."""
        case = Case(
            "differences", batch=(2,), queries=4, keys=5, head_dim=6, topk=9, value_dim=4,
            scale=0.7, lengths=(9, 3, 0, -2), sink=sinks, sink_dtype="float64",
        )  # fmt: skip
        inputs = make_inputs(case, "float64", seed=3)
        operands = inputs.operands
        grads = oracle.backward(operands, inputs.dout, inputs.dlse, **inputs.options)
        pairs = [("q", grads.dq), ("kv", grads.dkv)]
        if sinks is not None:
            pairs.append(("attn_sink", grads.dsink))
        for field, want in pairs:
            got = difference_quotients(operands, inputs, field)
            self.assertGreater(np.abs(want).max(), 1e-3)
            np.testing.assert_allclose(got, want, atol=1e-8, rtol=1e-7, err_msg=field)

    def test_two_zero_logits_have_an_lse_of_ln_2(self):
        operands = Operands(np.zeros((1, 1, 3)), np.ones((4, 3)), np.array([[1, 3]]), None, None)
        values = oracle.forward(operands)
        np.testing.assert_allclose(values.lse, np.log([[2.0]]), rtol=1e-15)
        np.testing.assert_allclose(values.out, np.ones((1, 1, 3)), rtol=1e-15)

    def test_sink_takes_its_share(self):
        """One zero logit and a sink of ln 3: the key keeps a quarter of the weight."""
        sink = np.log([3.0])
        operands = Operands(np.zeros((1, 1, 3)), np.ones((1, 3)), np.array([[0]]), None, sink)
        values = oracle.forward(operands)
        np.testing.assert_allclose(values.out, np.full((1, 1, 3), 0.25), rtol=1e-14)
        np.testing.assert_array_equal(values.lse, 0)

    def test_validity_of_slots(self):
        indices = np.array([[0, 3, 4, -1, -(2**31), 2**31 - 1, 2, 2]], np.int32)
        operands = Operands(None, np.zeros((4, 1)), indices, np.array([7]), None)
        np.testing.assert_array_equal(
            oracle.valid_slots(operands), [[True, True, False, False, False, False, True, False]]
        )

    def test_result_is_weighted_mean_written_out(self):
        """A query, two heads, three slots, one of them twice, by hand."""
        q, kv = np.array([[[1.0], [2.0]]]), np.array([[1.0], [-1.0]])
        operands = Operands(q, kv, np.array([[0, 1, 1]]), None, np.array([0.0, -np.inf]))
        values = oracle.forward(operands, scale=1.0)
        for h, x in enumerate((1.0, 2.0)):
            total = np.exp(x) + 2 * np.exp(-x)
            sink = 1.0 if h == 0 else 0.0
            out = (np.exp(x) - 2 * np.exp(-x)) / (total + sink)
            np.testing.assert_allclose(values.out[0, h, 0], out, rtol=1e-14)
            np.testing.assert_allclose(values.lse[0, h], np.log(total), rtol=1e-14)


if __name__ == "__main__":
    absltest.main()
