"""Numbers that the planner repeats, because it must not load torch: they are those of the code that it plans for."""

from burnish.boxes import rounds
from burnish.checkpoint import manifest
from burnish.checkpoint import writer as write
from burnish.engines.optim import adamw8bit
from burnish.engines.optim import state_offload as resting
from burnish.models import logprobs
from burnish.models.lora import merge as lora_merge
from burnish.plan import logits, memory, saving, slots
from burnish.rollout.builtin import decoding


def test_they_are_those_of_the_code():
    assert logits._SUMMED_ROWS == logprobs._SUMMED_ROWS
    assert logits._CPU_PIECE == logprobs._CPU_BLOCK_BYTES
    assert saving._BLOCK == manifest.BLOCK_BYTES
    assert saving._GROUP == write._GROUP_BYTES == write._WAVE_BYTES
    assert slots._SENT == memory._WAVE == rounds.WAVE_BYTES
    assert slots.WAVE == resting.WAVE
    assert slots._CHUNK == adamw8bit._CHUNK_ELEMENTS
    assert memory._MERGED == lora_merge._BLOCK_ELEMENTS
    assert memory._PREFILL_TOKENS == decoding._PREFILL_TOKENS
