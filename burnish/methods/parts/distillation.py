"""Teachers: frozen language models that score the student's sequences, as engines in its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.boxes.shards import ShardSource
from burnish.config.distillation import START, DistillConfig, TeacherConfig
from burnish.config.schema import ModelConfig
from burnish.data.tokenizer import load_tokenizer
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part
from burnish.engines.factory import make_engine
from burnish.errors import IncompatibleError
from burnish.files.hub import is_elsewhere
from burnish.methods.parts.policy_update import Forward
from burnish.models.heads import has_value_head
from burnish.models.loading import read_model_config, require_embeddings, weights_source
from burnish.models.meta_init import count_flops
from burnish.records import Batch, MicroBatch
from burnish.records.rollout_table import RolloutTable
from burnish.runs.setup import Foundation, load_start, prove_directory, prove_model
from burnish.runs.verify_inputs import Intact


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run on this rank."""

    config: DistillConfig
    device: torch.device
    forwards: Sequence[Forward]
    """Each scores a batch."""
    engines: Sequence[Engine]
    """Their engines, without the policy's own."""

    def answered(self, batches: Sequence[Batch], table: RolloutTable) -> list[Batch]:
        """Add what its teacher says of each token: `teacher_logprobs`. Collective."""
        places = {each.source: number for number, each in enumerate(self.config.teachers)}
        by_group = [places.get(source, places.get(None)) for source in table.sources]
        teachers = [by_group[group] for group in table.groups.tolist()]
        return [self._answered(batch, teachers) for batch in batches]

    def _answered(self, batch: Batch, teachers: Sequence[int | None]) -> Batch:
        logprobs = [
            torch.full(micro.loss_mask.shape, torch.nan, device=self.device)
            for micro in batch.microbatches
        ]
        for teacher, forward in enumerate(self.forwards):
            own = [
                [number >= 0 and teachers[number] == teacher for number in numbers]
                for numbers in batch.examples
            ]
            outputs = forward(_sequences_of(batch, own))
            for whole, output, micro, chosen in zip(
                logprobs, outputs, batch.microbatches, own, strict=True
            ):
                tokens = _tokens_of(micro, chosen)
                whole[tokens] = output.logprobs[: len(tokens)]
        return batch.with_field("teacher_logprobs", logprobs)


def _tokens_of(micro: MicroBatch, chosen: Sequence[bool]) -> Tensor:
    """Return the places of the tokens of some sequences of a micro-batch."""
    is_chosen = torch.tensor(chosen).repeat_interleave(micro.cu_seqlens.diff())
    return is_chosen.nonzero()[:, 0]


def _sequences_of(batch: Batch, chosen: Sequence[Sequence[bool]]) -> Batch:
    """Return a batch with some sequences of each micro-batch. A micro-batch without any keeps two tokens that are not trained on.

    So every rank runs as many micro-batches as the others, and no sequence leaves its rank.
    """
    micros = []
    for micro, own in zip(batch.microbatches, chosen, strict=True):
        tokens = _tokens_of(micro, own)
        lengths = micro.cu_seqlens.diff()[torch.tensor(own)]
        mask = micro.loss_mask[tokens]
        if not len(tokens):
            tokens = torch.arange(2)
            lengths = torch.tensor([2])
            mask = torch.zeros(2, dtype=torch.bool)
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        ids = micro.input_ids[tokens]
        micros.append(
            MicroBatch(
                ids,
                ends,
                mask,
                micro.num_tokens,
                micro.num_sequences,
                temperature=micro.temperature,
            )
        )
    return replace(batch, microbatches=tuple(micros))


def load_teachers(foundation: Foundation, policy: Engine, intact: Intact) -> Teachers:
    """Load the models of `distill.teachers`, in the policy's process groups. Collective."""
    forwards = list[Forward]()
    engines = list[Engine]()
    for teacher in foundation.config.distill.teachers:
        engine = _engine_of(teacher, foundation, policy, intact)
        forwards.append(partial(engine.forward, adapter=engine is not policy))
        engines += [] if engine is policy else [engine]
    return Teachers(foundation.config.distill, foundation.device, forwards, engines)


def _engine_of(
    teacher: TeacherConfig, foundation: Foundation, policy: Engine, intact: Intact
) -> Engine:
    if teacher.path == START:
        return load_start(foundation, policy, intact)
    config = foundation.config
    layout = foundation.layout
    device = foundation.device
    given = (teacher, foundation.tokenizer, config.model, config.seed, layout, device)
    hf_config, weights = read_teacher(*given)
    engine = make_engine(
        hf_config, config.engine, None, layout=layout, device=device, beside=policy
    )
    engine.load(weights, Part.WEIGHTS)
    prove_directory(engine, weights, hf_config, count_flops(hf_config), config.engine)
    return engine


def read_teacher(
    teacher: TeacherConfig,
    tokenizer: PreTrainedTokenizerBase,
    student: ModelConfig,
    seed: int,
    layout: Layout,
    device: torch.device,
) -> tuple[PretrainedConfig, ShardSource]:
    """Return a teacher's configuration and weights; reads only the weights' headers.

    Raises `IncompatibleError` for a model without a language head, and for one with another vocabulary than `tokenizer`.
    """
    model = ModelConfig(path=teacher.path, trust_remote_code=student.trust_remote_code)
    hf_config = read_model_config(model)
    if has_value_head(hf_config):
        raise IncompatibleError(
            f"{teacher.path} has a value head and no vocabulary",
            have=", ".join(hf_config.architectures or ()),
            want="a causal language model",
            do="set distill.teachers to language models; this one belongs in reward.models",
        )
    own = load_tokenizer(teacher.path, trust_remote_code=student.trust_remote_code)
    require_same_vocabulary(teacher.path, tokenizer, own)
    require_embeddings(hf_config, tokenizer)
    prove_model(hf_config, layout, device)
    return hf_config, weights_source(model, hf_config, seed)


def dry_runs_of_teachers(foundation: Foundation) -> Iterator[Callable[[], object]]:
    """Yield what reads the teachers that lie on this machine."""
    config = foundation.config
    given = (config.model, config.seed, foundation.layout, foundation.device)
    for teacher in config.distill.teachers:
        if teacher.path != START and not is_elsewhere(teacher.path):
            yield partial(read_teacher, teacher, foundation.tokenizer, *given)


def require_same_vocabulary(
    path: str, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> None:
    """Raise `IncompatibleError`, naming the first token, if a token of the student is another one of the teacher."""
    tokens = {number: token for token, number in student.get_vocab().items()}
    others = {number: token for token, number in teacher.get_vocab().items()}
    different = [number for number in sorted(tokens) if others.get(number) != tokens[number]]
    for number in different[:1]:
        theirs = repr(others[number]) if number in others else "none"
        raise IncompatibleError(
            f"the teacher {path} has another vocabulary, so it cannot score the student's tokens",
            have=f"token {number} is {tokens[number]!r} of the student and {theirs} of the teacher; "
            f"{len(different)} of {len(tokens)} tokens differ",
            want="the same token for each id",
            do="set distill.teachers to models of the student's family, with its tokenizer",
        )
