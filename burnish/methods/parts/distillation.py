"""Teachers: frozen language models that score the student's sequences, as engines in its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from burnish.boxes.shards import ShardSource
from burnish.config.distillation import START, DistillConfig, TeacherConfig
from burnish.config.schema import ModelConfig
from burnish.data.batching import make_batch
from burnish.data.tokenizer import load_tokenizer
from burnish.engines.base import Engine, Part
from burnish.engines.factory import make_engine
from burnish.errors import IncompatibleError
from burnish.files.hub import is_elsewhere
from burnish.methods.parts.policy_update import Forward
from burnish.models.divergence import (
    DivergenceProbe,
    Head,
    HeadProbe,
    Reference,
    StatesProbe,
    TopProbe,
    TopReference,
    WholeReference,
)
from burnish.models.flops import ModelFlops
from burnish.models.heads import has_value_head
from burnish.models.loading import read_model_config, require_embeddings, weights_source
from burnish.models.meta_init import count_flops
from burnish.records import Batch, Example, MicroBatch
from burnish.records.rollout_table import RolloutTable
from burnish.runs.setup import Foundation, load_start, prove_directory, prove_model
from burnish.runs.verify_inputs import Intact


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run on this rank."""

    config: DistillConfig
    forwards: Sequence[Forward]
    """Each scores a batch."""
    engines: Sequence[Engine]
    """Their engines, without the policy's own."""

    head: Head | None
    """The only teacher's output layer, if the whole vocabulary is compared."""

    def answered(self, batches: Sequence[Batch], table: RolloutTable) -> list[Batch]:
        """Add to rollouts what the teachers of their rows say. Collective."""
        places = {each.source: number for number, each in enumerate(self.config.teachers)}
        by_group = [places.get(source, places.get(None)) for source in table.sources]
        teachers = [by_group[group] for group in table.groups.tolist()]
        return [self.taught(batch, teachers.__getitem__) for batch in batches]

    def taught(self, batch: Batch, teacher_of: Callable[[int], int | None]) -> Batch:
        """Add `teacher_logprobs`, or a `probe` that compares with the teachers, given the teacher of each example. Collective."""
        answers: list[list[Tensor]] = [[] for _ in batch.microbatches]
        taught = [torch.zeros(int(m.loss_mask.sum()), dtype=torch.bool) for m in batch.microbatches]
        for teacher, forward in enumerate(self.forwards):
            own = [
                [number >= 0 and teacher_of(number) == teacher for number in numbers]
                for numbers in batch.examples
            ]
            asked = _sequences_of(batch, own)
            for place, said in enumerate(self._asked(forward, asked)):
                micro = batch.microbatches[place]
                rows = _is_of(micro, own[place])[micro.loss_mask]
                taught[place] |= rows
                wholes = answers[place]
                if not wholes:
                    wholes += [each.new_zeros(len(rows), *each.shape[1:]) for each in said]
                for whole, each in zip(wholes, said, strict=True):
                    whole[rows] = each
        if self.config.tokens == "sampled":
            columns = [
                torch.full(micro.loss_mask.shape, torch.nan).masked_scatter_(
                    micro.loss_mask, whole.masked_fill(~rows, torch.nan)
                )
                for micro, (whole,), rows in zip(batch.microbatches, answers, taught, strict=True)
            ]
            return batch.with_field("teacher_logprobs", columns)
        probes = [
            DivergenceProbe(self._reference(said), rows)
            for said, rows in zip(answers, taught, strict=True)
        ]
        return batch.with_field("probe", probes)

    def _asked(self, forward: Forward, batch: Batch) -> Iterator[Sequence[Tensor]]:
        """Yield of each micro-batch what a teacher says of its trained tokens, on the host."""
        config = self.config
        if config.tokens == "sampled":
            for output, micro in zip(forward(batch), batch.microbatches, strict=True):
                yield (output.logprobs.cpu()[micro.loss_mask],)
            return
        probe = TopProbe(config.k) if config.tokens == "topk" else StatesProbe()
        for output in forward(batch.with_field("probe", [probe] * len(batch.microbatches))):
            yield [each.cpu() for each in output.probed]

    def _reference(self, said: Sequence[Tensor]) -> Reference:
        if self.head is None:
            ids, logprobs = said
            return TopReference(ids, logprobs, self.config.mix)
        (states,) = said
        return WholeReference(states, self.head, self.config.mix)


def _is_of(micro: MicroBatch, chosen: Sequence[bool]) -> Tensor:
    """Return which tokens [T] belong to the chosen sequences of a micro-batch."""
    return torch.tensor(chosen).repeat_interleave(micro.cu_seqlens.diff())


def _sequences_of(batch: Batch, chosen: Sequence[Sequence[bool]]) -> Batch:
    """Return a batch with some sequences of each micro-batch. A micro-batch without any keeps two tokens that are not trained on.

    So every rank runs as many micro-batches as the others, and no sequence leaves its rank.
    """
    micros = []
    for micro, own in zip(batch.microbatches, chosen, strict=True):
        tokens = _is_of(micro, own).nonzero()[:, 0]
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
    config = foundation.config.distill
    head = _head(forwards[0], policy) if config.tokens == "all" else None
    return Teachers(config, forwards, engines, head)


def _head(forward: Forward, policy: Engine) -> Head:
    """Return a copy of a teacher's output layer. Collective."""
    nothing = Example(np.zeros(2, np.int64), np.zeros(2, np.bool_))
    batch = make_batch([nothing], policy.layout, 2, ModelFlops(1.0, {}, 1.0))
    batch = batch.with_field("probe", [HeadProbe()] * len(batch.microbatches))
    head: Head = forward(batch)[0].probed
    return head


def _engine_of(
    teacher: TeacherConfig, foundation: Foundation, policy: Engine, intact: Intact
) -> Engine:
    if teacher.path == START:
        return load_start(foundation, policy, intact)
    config = foundation.config
    hf_config, weights = read_teacher(teacher, foundation)
    engine = make_engine(
        hf_config,
        config.engine,
        None,
        layout=foundation.layout,
        device=foundation.device,
        beside=policy,
    )
    engine.load(weights, Part.WEIGHTS)
    prove_directory(engine, weights, hf_config, count_flops(hf_config), config.engine)
    return engine


def read_teacher(
    teacher: TeacherConfig, foundation: Foundation
) -> tuple[PretrainedConfig, ShardSource]:
    """Return a teacher's configuration and weights; reads only the weights' headers.

    Raises `IncompatibleError` for a model without a language head, and for one with another vocabulary than the student.
    """
    config = foundation.config
    tokenizer = foundation.tokenizer
    trusts = config.model.trust_remote_code
    model = ModelConfig(path=teacher.path, trust_remote_code=trusts)
    hf_config = read_model_config(model)
    if has_value_head(hf_config):
        raise IncompatibleError(
            f"{teacher.path} has a value head and no vocabulary",
            have=", ".join(hf_config.architectures or ()),
            want="a causal language model",
            do="set distill.teachers to language models; this one belongs in reward.models",
        )
    own = load_tokenizer(teacher.path, trust_remote_code=trusts)
    require_same_vocabulary(teacher.path, tokenizer, own)
    require_embeddings(hf_config, tokenizer)
    rows = hf_config.get_text_config().vocab_size
    students = foundation.hf_config.get_text_config().vocab_size
    if rows < students or (rows > students and config.engine.tensor_parallel > 1):
        raise IncompatibleError(
            f"the output layers of the teacher {teacher.path} and of the student have different sizes",
            have=f"{rows} rows and {students}, engine.tensor_parallel: {config.engine.tensor_parallel}",
            want="as many rows, or without tensor parallelism more of the teacher",
            do="set another teacher, or engine.tensor_parallel=1",
        )
    prove_model(hf_config, foundation.layout, foundation.device)
    return hf_config, weights_source(model, hf_config, config.seed)


def dry_runs_of_teachers(foundation: Foundation) -> Iterator[Callable[[], object]]:
    """Yield what reads the teachers that lie on this machine."""
    for teacher in foundation.config.distill.teachers:
        if teacher.path != START and not is_elsewhere(teacher.path):
            yield partial(read_teacher, teacher, foundation)


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
