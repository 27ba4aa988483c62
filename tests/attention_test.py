"""The attention suite, run by every implementation."""

import os
from unittest import mock

import suite
from absl.testing import absltest


class ReferenceTest(suite.AttentionSuite):
    implementation = "reference"


class XlaTest(suite.AttentionSuite):
    implementation = "xla"


class XlaDeterministicTest(suite.AttentionSuite):
    implementation = "xla"
    options = {"deterministic": True}


class XlaSmallBlocksTest(suite.AttentionSuite):
    """Blocks of two queries: several of them, and a last one that overlaps the one before."""

    implementation = "xla"

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(os.environ, {"JAX_DSA_XLA_BLOCK": "2"}))


if __name__ == "__main__":
    absltest.main()
