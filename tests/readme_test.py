"""README's Python samples run as shown; its commands are the ones that exist."""

import json
import pathlib
import re

from absl.testing import absltest, parameterized

from jax_dsa.bench import tables

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class ReadmeTest(parameterized.TestCase):
    @parameterized.parameters(*enumerate(SAMPLES))
    def test_sample_runs(self, number, sample):
        exec(compile(sample, f"README sample {number}", "exec"), {"__name__": "sample"})

    def test_first_sample_is_short(self):
        self.assertLessEqual(len(SAMPLES[0].strip().splitlines()), 10)

    def test_ci_runs_the_test_command(self):
        (command,) = re.findall(r"-m (pytest[^\n]*)\n", README)
        self.assertIn(command, (ROOT / ".ci" / "run").read_text(encoding="utf-8"))

    def test_table_of_times_is_that_of_its_data(self):
        data = json.loads((ROOT / "tests/gpu/bench_h200.json").read_text(encoding="utf-8"))
        table = README.partition("<!-- bench -->")[2].partition("<!-- /bench -->")[0]
        self.assertEqual(table.strip(), tables.table(data["results"]))

    def test_every_named_file_exists(self):
        for name in re.findall(r"`((?:examples|tests|jax_dsa)/[\w/]+\.\w+)", README):
            self.assertTrue((ROOT / name).exists(), name)


if __name__ == "__main__":
    absltest.main()
