"""The faults of others, on the implementations in jnp; on kernels: tests/gpu."""

import faults_suite
from absl.testing import absltest


class ReferenceFaultsTest(faults_suite.FaultsSuite):
    implementation = "reference"
    runs = 1


class XlaFaultsTest(faults_suite.FaultsSuite):
    implementation = "xla"


if __name__ == "__main__":
    absltest.main()
