"""How long a sequence may get, and a prompt, by what a completion leaves of it.

Asked by a run, which has the model, and by a dry run, which has its config.json. Left out: `data.max_prompt_length`, which is the user's own.
"""

from __future__ import annotations

from burnish.config.schema import RunConfig
from burnish.errors import UsageError


def longest_completed(config: RunConfig) -> int:
    """Tokens of the longest prompt and completion, as far as the settings limit them: a prompt of 1 where they do not."""
    prompt = config.data.max_prompt_length
    return config.rollout.max_response_length + (1 if prompt is None else prompt)


def room_for_prompts(config: RunConfig, positions: int | None) -> dict[str, int]:
    """Most tokens of a prompt, by what sets them: the micro-batch, and the model's `positions` where it has a limit.

    Raises `UsageError` where a completion leaves none.
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
