"""The lengths that prompts and sequences may have, given the completion's. Used by a run and by a dry run."""

from __future__ import annotations

from burnish.config.schema import RunConfig
from burnish.errors import UsageError


def longest_completed(config: RunConfig) -> int:
    """Return the tokens of the longest prompt and completion that the settings allow; a prompt without limit counts 1."""
    prompt = config.data.max_prompt_length
    return config.rollout.max_response_length + (1 if prompt is None else prompt)


def room_for_prompts(config: RunConfig, positions: int | None) -> dict[str, int]:
    """Return the most tokens of a prompt, by what limits them: the micro-batch, or the model's `positions`.

    Raises `UsageError` if a completion leaves no room.
    """
    response = config.rollout.max_response_length
    budgets = {"batch.tokens_per_device": config.microbatch_tokens}
    if positions is not None:
        budgets["the model's max_position_embeddings"] = positions
    for name, most in budgets.items():
        if response >= most:
            raise UsageError(
                "rollout.max_response_length leaves no room for a prompt",
                have=f"{response} of {name}: {most}",
                want=f"less than {most}",
                do=f"lower rollout.max_response_length, or have more of {name}",
            )
    return {
        f"{name} - rollout.max_response_length": most - response for name, most in budgets.items()
    }
