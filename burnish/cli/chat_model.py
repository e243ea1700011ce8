"""A model that answers messages, loaded for `burnish chat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from burnish.checkpoint.load import CheckpointSource
from burnish.config.schema import RolloutConfig
from burnish.data.chat import ChatEncoder
from burnish.data.messages import Message, Tools
from burnish.data.tokenizer import completion_decoder
from burnish.data.turn_bridge import TurnBridge
from burnish.distributed.layout import Layout
from burnish.engines.base import compute_dtype
from burnish.errors import UsageError
from burnish.methods.parts.rollouts import sampling
from burnish.models.meta_init import longest_sequence
from burnish.records import Request
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.runs.download_inputs import local_inputs
from burnish.runs.setup import lay_foundation, load_frozen, prove_model
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress

if TYPE_CHECKING:
    from burnish.cli.chat import ChosenModel

# A decoded text ends with this character while tokens of its last character are missing.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said."""

    text: str
    ids: list[int]
    """Its tokens."""
    is_cut: bool
    """Whether it reached the limit of tokens."""


class ChatModel:
    """A model with its tokenizer and generator."""

    def __init__(self, chosen: ChosenModel, layout: Layout, device: torch.device) -> None:
        """Load a model."""
        step = chosen.step
        local = local_inputs(chosen.config, device, layout)[1]
        foundation = lay_foundation(local, layout, device)
        prove_model(foundation.hf_config, layout, device, generates=True)
        Intact(layout, Progress(True)).require(*foundation.places(fresh=step is None))
        if step is not None:
            foundation = replace(foundation, source=CheckpointSource(step, layout))
        self._tokenizer = foundation.tokenizer
        self._data = local.data
        self._encoder = ChatEncoder(foundation.tokenizer, local.data)
        self._stops = (*foundation.eos_token_ids, *local.rollout.stop_token_ids)
        self._decode = completion_decoder(
            foundation.tokenizer, local.rollout.stop, foundation.eos_token_ids
        )
        self._positions = longest_sequence(foundation.hf_config)
        self._generator = BuiltinGenerator(
            foundation.hf_config,
            layout=layout,
            device=device,
            dtype=compute_dtype(local.engine),
            slots=1,
            eos_token_ids=foundation.eos_token_ids,
            decode=foundation.tokenizer.decode,
            lora=local.model.adapter_beside,
        )
        self._generator.load_weights(load_frozen(foundation).published(), version=0)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template. Without one, the model continues the texts of the messages."""
        return bool(self._tokenizer.chat_template)

    def answer(
        self,
        messages: Sequence[Message],
        how: RolloutConfig,
        seed: int,
        turn: int,
        show: Callable[[str], None],
    ) -> Reply:
        """Answer the last message. `show` gets the whole text so far, whenever it has grown.

        Raises `UsageError` if the conversation leaves no room for an answer, or the template refuses it.
        """
        if self.has_template:
            text = self._encoder.prompt([*messages], "the conversation")
        else:
            text = "".join(str(each["content"]) for each in messages)
        [ids] = self._encoder.ids([text], special=not self.has_template)
        return self.go_on(ids, how, seed, turn, show)

    def bridge(self, tools: Tools) -> TurnBridge:
        """Return what turns messages into ids for conversations with tools. Raises `UsageError` for a template without a place for them."""
        return TurnBridge(self._tokenizer, self._data, tools, self._stops)

    def go_on(
        self,
        ids: Sequence[int],
        how: RolloutConfig,
        seed: int,
        turn: int,
        show: Callable[[str], None],
        *,
        within: int = 0,
    ) -> Reply:
        """Continue token ids. `within` counts the answers of a turn. Raises `UsageError` if there is no room."""
        drawn = sampling(how, how, seed, turn)
        if self._positions is not None:
            room = self._positions - len(ids)
            if room < 1:
                raise UsageError(
                    "the conversation is too long for the model",
                    have=f"{len(ids)} tokens",
                    want=f"fewer than {self._positions}, the model's longest sequence",
                    do="begin a new one with /reset",
                )
            drawn = replace(drawn, max_tokens=min(drawn.max_tokens, room))
        shown = ""

        def watch(_: int) -> None:
            nonlocal shown
            [under_way] = self._generator.so_far()
            said = self._decode(under_way.completions[0].token_ids.tolist())
            if said.startswith(shown) and not said.endswith(_INCOMPLETE):
                shown = said
                show(said)

        request = Request(turn, np.array(ids), 1, turn=within)
        [[completion]] = self._generator.generate([request], drawn, watch)
        tokens = completion.token_ids.tolist()
        return Reply(self._decode(tokens), tokens, completion.stop_reason == "length")
