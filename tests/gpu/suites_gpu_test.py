"""The shared suites on "cutedsl"."""

import faults_suite
import suite
from absl.testing import absltest

KERNELS = {
    "implementation": "cutedsl",
    "dtypes": ("bfloat16", "float16"),
    "head_dims": (512, 576),
    "ordered_sums": False,
}


class CutedslTest(suite.AttentionSuite):
    locals().update(KERNELS)


class CutedslFaultsTest(faults_suite.FaultsSuite):
    locals().update(KERNELS)
    runs = 50


if __name__ == "__main__":
    absltest.main()
