"""What a training step and a decoding step ask of an accelerator, counted on a simulated one (`bench.counting`)."""

import json
import subprocess
import sys

import pytest

from bench import counting_decoding
from bench.counting import MOST


@pytest.mark.nightly
def test_a_token_launches_few_kernels_a_layer():
    command = [sys.executable, "-m", "bench.counting_decoding", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    layer, rest = json.loads(done.stdout.splitlines()[-1])
    assert 0 < layer <= counting_decoding.MOST[0]
    assert 0 < rest <= counting_decoding.MOST[1]


@pytest.mark.nightly
def test_micro_batches_launch_few_kernels_and_copy_and_wait_rarely():
    command = [sys.executable, "-m", "bench.counting", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for method, counts in json.loads(done.stdout.splitlines()[-1]).items():
        pairs = zip(counts["kernels"], MOST[method], strict=True)
        assert all(kernels <= most for kernels, most in pairs), counts
        assert counts["copies"] <= 3
        assert counts["reads"] == 0


@pytest.mark.nightly
def test_no_exposed_exchange_of_an_8b_model_is_as_large_as_a_gigabyte():
    """A rank waits for rows of the embeddings and for the first layer before its first product; after its last, for their gradients.

    The gradients of the first layer, in fp32, are the largest.
    """
    command = [sys.executable, "-m", "bench.counting", "--json", "--size", "Qwen3-8B"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for counts in json.loads(done.stdout.splitlines()[-1]).values():
        assert sum(counts["before"]) < 1e9
        assert max(counts["after"]) < 1e9
        assert sum(counts["after"]) < 1.2e9
        assert counts["reads"] == 0
