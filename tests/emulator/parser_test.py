"""PTX text to data: syntax, scopes, control flow, and what is refused with line and token."""

import textwrap

import harness
from absl.testing import absltest, parameterized

from jax_dsa.emulator import Program, PtxSyntaxError, UnsupportedInstruction
from jax_dsa.emulator.isa import TABLE
from jax_dsa.emulator.isa.table import expand
from jax_dsa.emulator.ptx import Address, Immediate, Pair, Vector, parse
from jax_dsa.emulator.ptx.flow import reconvergence


def only(text: str):
    (kernel,) = parse(text).kernels.values()
    return kernel


class ParserTest(parameterized.TestCase):
    def test_parameters_are_laid_out_by_alignment(self):
        kernel = only(
            harness.HEADER
            + ".visible .entry k(.param .u32 a, .param .align 64 .b8 m[128], .param .u64 p)\n"
            ".reqntid 8, 16, 1\n{ ret; }"
        )
        self.assertEqual(
            [(p.size, p.align, p.offset) for p in kernel.parameters],
            [(4, 4, 0), (128, 64, 64), (8, 8, 192)],
        )
        self.assertEqual(kernel.block, (8, 16, 1))

    def test_operands(self):
        body = (
            "mov.b64 {_, %r1}, %d1; elect.sync %r2|%p1, -1; ld.global.v2.b32 {%r3, %r4}, [%d1+-8];"
        )
        body += (
            " cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {%r1, %r2}], [%r3];"
        )
        mov, elect, load, copy, _ = only(harness.text(body)).code
        self.assertIsNone(mov.operands[0].items[0])
        self.assertIsInstance(elect.operands[0], Pair)
        self.assertEqual(elect.operands[1], Immediate(-1))
        self.assertIsInstance(load.operands[0], Vector)
        self.assertEqual(load.operands[1].offset, -8)
        self.assertIsInstance(copy.operands[0], Address)
        self.assertLen(copy.operands[0].coordinates, 2)

    def test_scopes_repeat_names(self):
        scope = "{ .reg .pred P; LOOP: setp.eq.u32 P, %r1, 0; @P bra DONE; bra LOOP; DONE: }\n"
        code = only(harness.text(scope + scope)).code
        first, second = code[0], code[3]
        self.assertNotEqual(first.operands[0].name, second.operands[0].name)
        self.assertEqual([code[i].operands[0].target for i in (1, 2, 4, 5)], [3, 0, 6, 3])

    def test_numbers(self):
        body = (
            "mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0x10; mov.b32 %r3, -5; mov.b64 %d1,"
            " 0d3FF0000000000000;"
        )
        values = [i.operands[1].value for i in only(harness.text(body)).code[:4]]
        self.assertEqual(values, [1.0, 16, -5, 1.0])

    @parameterized.named_parameters(
        ("token", "add.s32 %r1, ?;", "?"),
        ("register", "add.s32 %r1, %r2, %nope;", "%nope"),
        ("label", "bra NOWHERE;", "NOWHERE"),
        ("comma", "add.s32 %r1 %r2;", "%r2"),
        ("end", "{ add.s32 %r1, %r2, %r3;", "end of text"),
    )
    def test_syntax_errors_name_line_and_token(self, body, token):
        with self.assertRaises(PtxSyntaxError) as caught:
            parse(harness.text("\n" + body))
        self.assertEqual(caught.exception.token, token)
        self.assertIn(f"line {caught.exception.line}", str(caught.exception))

    def test_unsupported_forms_name_the_nearest_one(self):
        with self.assertRaises(UnsupportedInstruction) as caught:
            Program(harness.text("add.sat.s32 %r1, %r2, %r3;")).code("test")
        self.assertIn("add.s32", str(caught.exception))
        self.assertEqual(caught.exception.opcode, "add.sat.s32")
        self.assertGreater(caught.exception.line, 1)

    def test_operands_that_do_not_fit_are_refused(self):
        with self.assertRaises(UnsupportedInstruction):
            Program(harness.text("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];")).code(
                "test"
            )


class FlowTest(parameterized.TestCase):
    def test_lanes_meet_at_the_immediate_post_dominator(self):
        body = textwrap.dedent("""
            @%p1 bra A;
            add.s32 %r1, %r1, 1;
            bra B;
            A: add.s32 %r1, %r1, 2;
            B: @%p2 bra B;
            @%p3 bra C;
            exit;
            C: add.s32 %r1, %r1, 3;""")
        kernel = only(harness.text(body))
        meets = reconvergence(kernel)
        self.assertEqual(meets[0], 4)
        self.assertEqual(meets[4], 5)
        self.assertEqual(meets[5], len(kernel.code))


class TableTest(parameterized.TestCase):
    def test_templates(self):
        self.assertEqual(expand("a{|.x}.{u|v}"), ["a.u", "a.v", "a.x.u", "a.x.v"])

    def test_every_row_says_what_it_does(self):
        self.assertEqual([form for form, row in TABLE.items() if not row.doc.strip()], [])


if __name__ == "__main__":
    absltest.main()
