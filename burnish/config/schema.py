"""Every setting of a run, typed, with its meaning once, under the field.

Sizes that change the algorithm are global (`batch.prompts`); sizes that change only speed are per
device (`batch.tokens_per_device`). Importing this loads neither torch nor transformers, so a
laptop can check a cluster's run. Left out: what a run leaves (`burnish.config.keeping`); reading files and overrides (`burnish.config.load`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from burnish.config.keeping import CheckpointConfig, TrackingConfig
from burnish.config.section import FunctionName, Section
from burnish.errors import UsageError

_LOGITS_AT_ONCE = 1 << 28
"""Where `engine.logprob_chunk` does not say how many."""
MomentDecay = Annotated[float, Field(ge=0, lt=1)]
"""AdamW's beta."""
TokenId = Annotated[int, Field(ge=0, strict=True)]
"""A token of the model's vocabulary."""
AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "grpo_batch_std",
    "rloo",
    "opo",
    "gpg",
    "pass_at_k",
    "gdpo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
]
"""The built-in advantages."""
PolicyLossName = Literal[
    "ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"
]
"""The built-in policy losses."""
AggregationKind = Literal[
    "token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_fixed"
]
KLEstimator = Literal["k1", "k2", "k3"]
StopText = Annotated[str, Field(min_length=1)]
"""A text that ends a completion; an empty one would end all of them at once."""


class LoraConfig(Section):
    """Train a low-rank adapter (arXiv 2106.09685) on the model's linear layers, or its experts, instead of the model."""

    path: str | None = None
    """An adapter to go on from, which brings rank, alpha, layers and their scale: a directory of PEFT's, such as an earlier run's step/model; a path or a URL. Resuming reads it again; `burnish eval` does not."""
    rank: int = Field(0, ge=0)
    """Width of a new adapter; 0: none, the whole model is trained."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    targets: list[str] = Field(default_factory=list)
    """Linear layers by the last part of their names, as q_proj, and fused experts as experts.gate_up_proj and experts.down_proj; all linear layers but the output layer, and no experts, when not given."""
    rslora: bool = False
    """Scale by alpha / √rank instead (arXiv 2312.03732)."""
    publish: Literal["merged", "adapter"] = "merged"
    """What the generator gets after each step. merged: the whole model, the adapter added to its weights, with which a token takes least time. adapter: A and B alone, few bytes, which it computes with beside the weights, as training does."""


class ModelConfig(Section):
    """Which model is trained."""

    path: str | None = None
    """A Hugging Face model directory to start from. Like all inputs, a path or a URL: s3://, gs://, hdfs://, file://."""
    fresh: str | dict[str, Any] | None = None
    """Instead of `path`: a config.json (a file, or its content as a mapping) to make a new model from, with random weights."""
    tokenizer: str | None = None
    """Directory of the tokenizer; the model's own when not given."""
    chat_template: str | None = None
    """A Jinja file to use instead of the tokenizer's own chat template."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's directory."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Train an adapter, on a model that stays as it is."""

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that is trained; None where it is the model itself."""
        return self.lora if self.lora.rank or self.lora.path else None

    @property
    def adapter_beside(self) -> LoraConfig | None:
        """The adapter that the generator holds beside the model; None where there is none, or it is merged in."""
        return self.adapter if self.lora.publish == "adapter" else None


class EngineConfig(Section):
    """How the model is trained."""

    kind: Literal["torch", "megatron"] = "torch"
    """torch: PyTorch FSDP2 on any number of processes. megatron: Megatron-Core, with pipelines and experts in parallel; needs megatron-core."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: fp32 main weights and optimizer state, bf16 compute, fp32 gradient reduction. fp32: everything fp32."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global 2-norm."""
    max_skipped_steps: int = Field(3, ge=1)
    """Stop the run after this many non-finite gradient norms in a row."""
    replicas: int = Field(1, ge=1)
    """HSDP: this many copies of the sharded model, so that gathers stay among processes / replicas neighbours. Divides the processes."""
    sequence_parallel: int = Field(1, ge=1)
    """Ulysses: so many processes share the tokens of a micro-batch, each of which may have as many times `batch.tokens_per_device`. Divides the attention heads."""
    tensor_parallel: int = Field(1, ge=1)
    """So many neighbouring processes share the matrices of each layer and the vocabulary. Divides the attention heads and the key heads; megatron: or is a multiple of the key heads."""
    megatron_sequence_parallel: bool = True
    """megatron, with `tensor_parallel`: between matrices each of the neighbours has a part of the tokens, which saves memory. Mixtures of experts need it."""
    pipeline_parallel: int = Field(1, ge=1)
    """megatron: the layers are divided among so many groups of processes, which micro-batches pass one after the other."""
    virtual_stages: int = Field(1, ge=1)
    """megatron, with `pipeline_parallel`: so many shorter stages for each process, which leaves less idle time in the pipeline and needs more exchanges."""
    expert_parallel: int = Field(1, ge=1)
    """megatron, mixtures of experts: so many processes share the experts of a layer, each of which has whole ones. Divides the experts."""
    expert_tensor_parallel: int | None = Field(None, ge=1)
    """megatron, mixtures of experts: so many processes share the matrices of each expert; `tensor_parallel` when not given."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """megatron: whose matrices, norms and experts. auto: TransformerEngine's where it is installed, on CUDA in bf16; else torch's. Where Apex is installed, these add gradients by its kernel, unless torch is asked for."""
    reshard_after_forward: bool = True
    """Free each layer's gathered weights between forward and backward: less memory, one more gather."""
    reduce_each_microbatch: bool = True
    """Where the model is sharded, reduce-scatter gradients after every micro-batch. Without, once a step: less to send, but until then each process holds the fp32 gradients of the whole model."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """What the backward pass computes again instead of keeping it: nothing; whole layers; within layers all but matrix products and attention. megatron, selective: attention and rotary positions alone (arXiv 2205.05198)."""
    activation_offload: bool = False
    """Keep on the host what decoder layers save for the backward pass, but for two of them. Copies run beside the computing."""
    optimizer_offload: bool = False
    """Keep the optimizer's state on the host; for a step it comes to the device, some weights' at a time."""
    park: bool = False
    """rl: weights, gradients and optimizer state are on the host while completions are generated; also those of critic and reference. An evaluation parks nothing."""
    compile: bool = False
    """Compile each decoder layer with torch.compile: faster steps after a first one that takes a minute or more. Needs a C++ compiler."""
    router_aux_loss: float = Field(0.0, ge=0)
    """Mixtures of experts: weight of the load-balancing loss (arXiv 2101.03961), as config.json's `router_aux_loss_coef`; 0: none. Needs one more forward pass where the experts of a step are not known before it."""
    logprob_chunk: int | None = Field(None, ge=1)
    """Tokens whose logits exist at one time; as many as make 2²⁸ logits when not given, which are half a GiB in bf16. Those of all but the last so many are computed again in the backward pass."""

    @property
    def sharing(self) -> int:
        """Processes that work on the same micro-batch."""
        return self.sequence_parallel * self.tensor_parallel * self.pipeline_parallel

    def logprob_rows(self, vocabulary: int) -> int:
        """Tokens whose logits exist at one time, of a model with a vocabulary of this size."""
        return self.logprob_chunk or max(1, _LOGITS_AT_ONCE // vocabulary)

    @property
    def expert_sharing(self) -> int:
        """Processes that the experts of a layer are divided among."""
        return self.expert_parallel * (self.expert_tensor_parallel or self.tensor_parallel)


class OptimConfig(Section):
    """The optimizer and its learning rate, a pure function of the step."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101). muon (arXiv 2502.16982): for the matrices of decoder layers, with adamw for the rest and one learning rate for both."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What follows the warm-up: constant; linear or cosine decay to the end; wsd: constant, then linear over `decay_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    decay_steps: int = Field(0, ge=0)
    """wsd only: steps of decay at the end."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The decay ends at this fraction of `lr`."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.999)
    """AdamW's decay of first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """AdamW's moments between steps, which compute with fp32 either way. bf16: half the memory (arXiv 2412.19437, section 3.3.3), with both of `betas` at most 0.996."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """muon only: decay of the momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices: not on norms and biases."""


class DataConfig(Section):
    """What is trained on and validated on: JSON Lines or Parquet files."""

    train: list[str] = Field(default_factory=list)
    """Files, directories or glob patterns, on this machine or as URLs."""
    validation: list[str] = Field(default_factory=list)
    """The same, held out."""
    prompt_column: str | None = None
    """RL and prompt/completion data: the column of the prompt, text or messages. Found by its usual names when not given."""
    completion_column: str | None = None
    """SFT: the column of the answer, for prompt/completion data; `completion` when not given."""
    answer_column: str | None = None
    """RL: the column of the ground truth; `answer`, `ground_truth` or verl's `reward_model.ground_truth` when not given."""
    messages_column: str | None = None
    """Chat data: the column of the messages; `messages` when not given."""
    text_column: str | None = None
    """Plain text data: the column of the text; `text` when not given. A column that is named here or above is the one that is read, whatever others there are; dots go into nested columns."""
    string_prompts: Literal["raw", "user"] = "raw"
    """How a prompt that is a string is read. raw: as it stands, without the chat template, as TRL does. user: as the message of a user, so that reward functions and models get messages, and a string completion of SFT is the assistant's."""
    system_prompt: str | None = None
    """A system message before every conversation that does not begin with one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, as {enable_thinking: false}, for training and validation alike. They are not saved with the model: whoever asks it has to give them too."""
    max_prompt_length: int | None = Field(None, ge=1)
    """RL: longest prompt in tokens; none when not given."""
    max_length: int | None = Field(None, ge=2)
    """SFT: longest example in tokens; `batch.tokens_per_device` when not given."""
    overlong: Literal["drop", "error"] = "drop"
    """What happens to a prompt or example over its limit: dropped and counted, or the run stops before it starts."""
    shuffle: bool = True
    """Draw a new order every epoch, from `seed`."""


class BatchConfig(Section):
    """How much goes into a step."""

    prompts: int = Field(16, ge=1)
    """RL: prompts per step, over all ranks."""
    examples: int = Field(16, ge=1)
    """SFT: examples per step, over all ranks."""
    minibatches: int = Field(1, ge=1)
    """RL: parts that a step's prompts are divided into, with one optimizer step each."""
    epochs: int = Field(1, ge=1)
    """RL: passes of these optimizer steps over the completions of a step, each further one in another order. With each the policy is further from the one that the completions are from."""
    tokens_per_device: int = Field(8192, ge=2)
    """Most tokens in one micro-batch, times `engine.sequence_parallel`. Never exceeded; a longer sequence is an error."""


class SamplingConfig(Section):
    """How completions are drawn."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits; 0 takes the most probable token."""
    top_k: int = Field(0, ge=0)
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens that reaches this probability."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less probable than this times the most probable."""


class RolloutConfig(SamplingConfig):
    """How the policy's completions are generated for training."""

    n: int = Field(8, ge=1)
    """Completions per prompt: the group."""
    max_response_length: int = Field(256, ge=1)
    """Longest completion in tokens."""
    stop: list[StopText] = Field(default_factory=list)
    """Texts that end a completion, besides the model's end-of-sequence ids. The text stays in it, with all of the token that ends it: it is learned, and rewards see it."""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    """Further token ids that end a completion, as those of the end of a turn; they stay in it and are learned."""
    slots: int = Field(256, ge=1)
    """Most sequences generated at one time, per device."""


class RewardFunctionConfig(Section):
    """One reward function."""

    function: str
    """`module:function`, `file.py:function`, or a built-in: exact_match, numeric, regex, math_verify."""
    weight: float = 1.0
    """Factor on its value in the sum."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments for every call."""
    per_call: int | None = Field(None, ge=1)
    """Of a function in TRL's signature: most completions in one call, so that calls are divided over `reward.workers` and each has its own deadline; all that this process has when not given. A multiple of `rollout.n` keeps the samples of a prompt together."""


class RewardModelConfig(Section):
    """One model that judges completions."""

    path: str
    """A directory of a sequence or token classification model with one label, with its tokenizer; a path or a URL."""
    weight: float = 1.0
    """Factor on its value in the sum."""
    name: str | None = None
    """What its part of the reward is called in metrics and rollouts; the last part of `path` when not given."""

    @property
    def part_name(self) -> str:
        """Return its name, or the last part of its path."""
        return self.name or self.path.rstrip("/").rpartition("/")[2]


class RewardConfig(Section):
    """What completions are worth."""

    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    """The functions; their weighted sum is the reward."""
    models: list[RewardModelConfig] = Field(default_factory=list)
    """Reward models: what each says at the last token of prompt and completion, as its own chat template writes them, is added to that."""
    timeout_seconds: float = Field(30.0, gt=0)
    """Deadline of each call, from when it begins. A call that misses it counts as an error on its rollouts; a function that misses it again and again is not called for the rest of the step. A function in TRL's signature gets all completions of a process in one call, so all of them fail when it is too slow: `per_call` divides them."""
    workers: int = Field(4, ge=1)
    """Processes that call functions, beside each training process, each making one call at a time. The calls of an async function are made in one of them."""
    concurrency: int = Field(32, ge=1)
    """Calls of an async function under way at one time, per training process: what a judge behind a network is asked at once is this times their number."""
    on_error: float = 0.0
    """The value of a function that raised, timed out or returned NaN, and of a model that cannot read so long a text."""
    max_failed_rounds: int = Field(3, ge=1)
    """Stop the run when functions fail for every completion of so many rounds in a row. A round is what is scored at once, in training or validation."""

    @property
    def part_names(self) -> list[str]:
        """Return the names of the reward's parts: those of the functions, then of the models; the second of a name is `name_2`.

        Further numbers of a verl function are FUNCTION/NAME; only its answers tell which.
        """
        given = [function.function.rpartition(":")[2] for function in self.functions]
        given += [model.part_name for model in self.models]
        names: list[str] = []
        for base in given:
            name, number = base, 1
            while name in names:
                number += 1
                name = f"{base}_{number}"
            names.append(name)
        return names

    @property
    def given(self) -> bool:
        """Whether there is anything that says what a completion is worth."""
        return bool(self.functions or self.models)


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

    enabled: bool = False
    """Replace groups whose rewards are all equal by groups of further prompts."""
    part: str | None = None
    """The part of the reward that is compared, by its name in the metrics `reward/parts/NAME`; the whole reward when not given. With several functions the whole varies where only a lesser one does."""
    max_refills: int = Field(4, ge=1)
    """Rounds of further generation in one step; after them the step runs with what there is."""


class OverlongConfig(Section):
    """DAPO's soft punishment of overlong completions (arXiv 2503.14476, equation 13)."""

    buffer: int = Field(0, ge=0)
    """Tokens before `rollout.max_response_length` over which the penalty grows linearly; 0: no penalty."""
    penalty: float = Field(1.0, ge=0)
    """The penalty at full length, subtracted from the reward."""


class KLConfig(Section):
    """Divergence from the frozen reference model, the one training started from."""

    coef: float = Field(0.0, ge=0)
    """Weight of the term; 0: no reference model is kept."""
    estimator: KLEstimator = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward of each token."""
    target: float | None = Field(None, gt=0)
    """With place reward: adapt coef so that the mean KL per token stays near this (arXiv 1909.08593, section 2.2); fixed when not given."""
    horizon: int = Field(10_000, ge=1)
    """With target: rollouts in which coef changes by its largest factor, about 1.2."""


class AlgorithmConfig(Section):
    """The formula."""

    advantage: AdvantageName | FunctionName = "grpo"
    """How rewards become advantages; gae: with the critic of PPO. A function of your own: file.py:function or module:function."""
    policy_loss: PolicyLossName | FunctionName = "ppo"
    """The policy loss. A function of your own: file.py:function or module:function. gspo (arXiv 2507.18071) belongs with aggregation sequence_mean, clip_low 3e-4 and clip_high 4e-4; cispo (arXiv 2506.13585) with token_mean and clip_low 1."""
    clip_low: float = Field(0.2, ge=0)
    """The ratio is clipped below 1 - clip_low. gmpo: the log-ratio below -clip_low. dppo: the bound of the divergence where the advantage is negative."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high. gmpo: the log-ratio above clip_high. dppo: the bound of the divergence where the advantage is positive."""
    dual_clip: float | None = Field(None, gt=1)
    """ppo and clip_cov only: bound of the ratio where the advantage is negative (arXiv 1912.09729); none when not given."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """sapo only: how fast its gate closes where the advantage is positive."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """sapo only: how fast its gate closes where the advantage is negative."""
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """clip_cov and kl_cov only: share of a mini-batch's tokens that they treat apart, for the covariance of log-prob and advantage."""
    cov_low: float = Field(1.0, ge=0)
    """clip_cov only: smallest covariance of a token that it leaves out."""
    cov_high: float = Field(5.0, gt=0)
    """clip_cov only: largest covariance of a token that it leaves out."""
    cov_penalty: float = Field(1.0, ge=0)
    """kl_cov only: weight of |log ratio| at the tokens of largest covariance."""
    top_entropy: float | None = Field(None, gt=0, lt=1)
    """Train on this share of a mini-batch's tokens, those of highest entropy (arXiv 2506.01939 has 0.2); all when not given."""
    aggregation: AggregationKind = "token_mean"
    """token_mean: over all tokens. token_sum: sum over all tokens. sequence_mean: mean of each sequence's token mean. sequence_sum: mean of each sequence's token sum. sequence_sum_fixed: sum over tokens / max_response_length, mean over sequences (Dr. GRPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["rollout", "recompute"] = "recompute"
    """Where the ratio's denominator comes from: a forward pass of the engine, or the generator's raw log-probs."""
    mismatch_cap: float | None = Field(None, ge=1)
    """Truncated importance sampling (Yao et al. 2025): the policy loss of each token times the engine's probability of it before the update over the one that the generator drew it with, at most this; not at all when not given."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """With mismatch_cap: whose probability is compared, the token's or the whole sequence's."""
    mismatch_reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave tokens out of the policy loss where the engine's probability over the generator's is outside [mismatch_low, mismatch_high]. token: of each token (IcePop). sequence: of the whole sequence (MIS). geometric: its mean per token."""
    mismatch_low: float = Field(0.5, gt=0, le=1)
    """Lower bound of mismatch_reject."""
    mismatch_high: float = Field(5.0, ge=1)
    """Upper bound of mismatch_reject."""
    mask_truncated: bool = False
    """Do not train on completions that were cut at max_response_length. They count in the advantages of their group."""
    router_replay: Literal["none", "recompute", "rollout"] = "none"
    """Mixtures of experts: where the experts come from that tokens go to in the update. none: the routers as they are then. recompute (R2, arXiv 2507.18071): the routers before the step's updates. rollout (R3, arXiv 2510.11370): the generator's."""
    kl: KLConfig = Field(default_factory=KLConfig)
    """Divergence from the reference."""
    dynamic_sampling: DynamicSamplingConfig = Field(default_factory=DynamicSamplingConfig)
    """Refill groups without variance."""
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    """Punish overlong completions softly."""


class CriticConfig(Section):
    """PPO's critic, for `algorithm.advantage` gae: a second model, of the policy's optimizer and layout, that learns what states are worth."""

    path: str | None = None
    """A directory to start it from: a token classification model with one label, or a language model, which gets a fresh head; the policy's model when not given."""
    lr: float = Field(1e-5, ge=0)
    """Its peak learning rate; all else is as `optim` says."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the beginning in which it learns alone and the policy, with its learning rate's schedule, waits."""
    clip: float | None = Field(0.2, gt=0)
    """Its values are held within so much of those before the update; null: not at all."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of the reward per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation (arXiv 1506.02438): 0 trusts the critic, 1 the rewards."""


class EvaluationConfig(SamplingConfig):
    """Validation on held-out data."""

    every: int = Field(0, ge=0)
    """Steps between validations, the last step always validated; 0: none after the first step."""
    before: bool = True
    """Validate before the first step, where there are held-out data."""
    n: int = Field(1, ge=1)
    """Completions per prompt, for mean@n, pass@n and maj@n, which the first reward function scores."""
    solved: float = 1.0
    """The score from which a completion is correct, in pass@n."""
    prompts: int | None = Field(None, ge=1)
    """Use only the first so many prompts or examples."""


class DistributedConfig(Section):
    """Processes and their patience."""

    timeout_seconds: float = Field(600.0, gt=0)
    """How long a collective may wait for the other ranks before the run stops, and the process that saves in the background may read and write nothing before its save has failed."""


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    """Names the run's directory."""
    output_dir: str = "runs"
    """Where run directories lie. A URL: they lie in runs/ and are copied below it, as with checkpoint.mirror."""
    seed: int = Field(0, ge=0)
    """All randomness derives from it."""
    steps: int | None = Field(None, ge=1)
    """Training steps, all of one size; `epochs` over the data when not given."""
    epochs: int = Field(1, ge=1)
    """Passes over the data, where `steps` is not given. In each, every prompt or example is taken once, so the last step of an epoch may be smaller. With `algorithm.dynamic_sampling`, which takes more prompts: as many steps as full batches of the data would make."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest committed step of this run. never: refuse when there is one."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """Which model is trained."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """How it is trained."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The optimizer and its learning rate."""
    data: DataConfig = Field(default_factory=DataConfig)
    """What is trained on."""
    batch: BatchConfig = Field(default_factory=BatchConfig)
    """How much goes into a step."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """RL: how completions are generated."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """RL: what completions are worth."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """RL: the formula."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """RL: PPO's critic."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Validation on held-out data."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save, and what to keep."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    """Where the numbers go."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Processes and their patience."""

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens in one micro-batch, on all the devices that share it."""
        return self.batch.tokens_per_device * self.engine.sequence_parallel

    @property
    def directory(self) -> Path:
        """The run's directory, on this machine."""
        return Path("runs" if is_remote(self.output_dir) else self.output_dir) / self.name

    @property
    def mirror_url(self) -> str | None:
        """The URL of the copy of the run's directory; None if there is none."""
        remote = self.output_dir if is_remote(self.output_dir) else self.checkpoint.mirror
        return None if remote is None else f"{remote.rstrip('/')}/{self.name}"

    @property
    def longest_completed(self) -> int:
        """Tokens of the longest prompt and completion that the settings allow; a prompt without limit counts 1."""
        return self.rollout.max_response_length + (self.data.max_prompt_length or 1)

    def prompt_limits(self, positions: int | None) -> dict[str, int]:
        """Return the most tokens of a prompt, by what limits them: the micro-batch, or the model's `positions`.

        Raises `UsageError` if a completion leaves no room.
        """
        response = self.rollout.max_response_length
        budgets = {"batch.tokens_per_device": self.microbatch_tokens}
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
            f"{name} - rollout.max_response_length": n - response for name, n in budgets.items()
        }


def is_remote(place: str) -> bool:
    """Return whether a setting names a URL, and not a path."""
    return "://" in place
