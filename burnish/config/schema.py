"""Every setting of a run: its type, its bounds and, under the field, its meaning.

Sizes that change the algorithm are global (`batch.prompts`), others per device (`batch.tokens_per_device`). `MayChange[...]` may
differ when a run is resumed. Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from burnish.config.algorithm import AlgorithmConfig
from burnish.config.distillation import DistillConfig
from burnish.config.environment import EnvironmentConfig
from burnish.config.section import MayChange, Section

_LOGITS_AT_ONCE = 1 << 28
"""Logits that exist at one time if `engine.logprob_chunk` is not given."""

MOST_SLOTS = 512
"""Most sequences that a device generates at one time if `rollout.slots` is auto."""
AUTO_TOKENS = 8192
"""The least that `batch.tokens_per_device: auto` is. A sequence without a limit has at most as many tokens then, times `engine.sequence_parallel`."""
_AUTO_PROMPT = 2048
"""Tokens that a prompt without a limit may have in any case if `batch.tokens_per_device` is auto."""

ExtensionName = Annotated[str, Field(pattern=r"^([A-Za-z][\w.-]*|.+:[A-Za-z_]\w*)$")]
"""The name of an entry point, file.py:Class or module:Class. `burnish.extend` finds it."""
Share = Annotated[str, Field(pattern=r"^(\d{1,2}(\.\d+)?|100)%$")]
"""A share of all steps or rows: 10%. `burnish.config.shares` counts."""
Epochs = Annotated[str, Field(pattern=r"^(\d+(\.\d+)?|\d+/[1-9]\d*) epochs?$")]
"""An interval in epochs: 1 epoch, 1/4 epoch, 0.5 epoch."""
AutoTokens = Annotated[str, Field(pattern=r"^auto(:[0-9]{1,12})?$")]
"""auto, or auto:32768 where it is decided."""
FORMER_LR = 1e-6
FORMER_ALPHA = 32.0
"""What `optim.lr` and `model.lora.alpha` were by default in earlier versions. Runs of that time keep them."""
MomentDecay = Annotated[float, Field(ge=0, lt=1)]
"""AdamW's beta."""


class LoraConfig(Section):
    """Train a low-rank adapter (arXiv 2106.09685) on linear layers or experts, instead of the whole model."""

    path: str | None = None
    """An adapter to continue from: a directory that PEFT wrote, such as step/model of an earlier run; a path, a hub's id or a URL. It determines rank, alpha, layers and scale. Resuming reads it again; `burnish eval` does not."""
    rank: int = Field(0, ge=0)
    """Width of a new adapter. 0: none, the whole model is trained."""
    alpha: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """The adapter's output is scaled by alpha / rank. auto: 2 · rank, so that a higher rank alone changes no scale; with rslora 32, since that scale depends on the rank."""
    targets: list[str] = []
    """Linear layers by the last part of their names, such as q_proj; fused experts as experts.gate_up_proj and experts.down_proj. Default: all linear layers except the output layer, numbered ones and those that PEFT cannot adapt, which a warning names; and no experts."""
    rslora: bool = False
    """Scale by alpha / √rank instead (arXiv 2312.03732)."""
    dora: bool = False
    """Learn the magnitude of each output apart from its direction (DoRA, arXiv 2402.09353), as PEFT's use_dora. Linear layers only. A training pass takes longer, and needs memory for a copy of each layer's weight."""
    quantize_base: Literal["none", "nf4"] = "none"
    """nf4: hold the frozen linear layers in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes, which the extra `qlora` installs. Each product dequantizes its weight. For methods that generate nothing."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of each adapted layer's inputs that its adapter does not see in a training pass, as PEFT's lora_dropout. Log-probs before an update, validations and rollouts see all. Not for experts."""
    modules_to_save: list[str] = []
    """Layers that train whole beside the adapter, and are saved with it, as PEFT's modules_to_save: endings of their names, such as lm_head and embed_tokens. One table for input and output stays one."""
    publish: MayChange[Literal["merged", "adapter"]] = "merged"
    """What the generator gets after each step. merged: the whole model with the adapter added to its weights, which decodes fastest. adapter: only A and B, which are few bytes; the generator computes with them beside the weights, as training does."""

    @property
    def scale_alpha(self) -> float:
        """`alpha` as a number."""
        if self.alpha != "auto":
            return self.alpha
        return FORMER_ALPHA if self.rslora else 2.0 * self.rank

    @model_validator(mode="before")
    @classmethod
    def _forget_former_alpha(cls, value: Any) -> Any:
        """Runs of earlier versions recorded an alpha where they had no adapter."""
        is_open = isinstance(value, Mapping) and not value.get("rank")
        if is_open and value.get("alpha") == FORMER_ALPHA:
            return {name: each for name, each in value.items() if name != "alpha"}
        return value


class ModelConfig(Section):
    """The model to train."""

    path: MayChange[str | None] = None
    """The model to start from: a Hugging Face directory, or an id of the Hugging Face Hub, as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION. A name that exists on this machine is a path. Like all inputs, it may also be a URL: hf://, s3://, gs://, hdfs://, file://, or file.py:Class:// with a class of your own."""
    fresh: str | dict[str, Any] | None = None
    """Instead of `path`: a config.json, as a file or a mapping. The run starts from a new model with random weights."""
    tokenizer: MayChange[str | None] = None
    """Directory or hub's id of the tokenizer. Default: the model's own."""
    chat_template: str | None = None
    """A Jinja file to use instead of the tokenizer's own chat template."""
    trust_remote_code: MayChange[bool] = False
    """Run the Python code in the model's directory."""
    train: list[Annotated[str, Field(min_length=1)]] = []
    """Train only the weights in whose names, as in the checkpoint, one of these regular expressions is found, such as lm_head or layers.1.mlp. The others stay as they are. Default: all."""
    train_mtp: MayChange[bool] = False
    """Train the layer for multi-token prediction (MTP, arXiv 2412.19437) that the files of some models hold, such as DeepSeek-V3's, GLM-4.5's and Qwen3-Next's: by `burnish sft` on the Megatron engine. Its loss has the weight 0.1. Default: every step has it as it was."""
    lora: LoraConfig = LoraConfig()
    """Train an adapter and leave the model as it is."""

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that is trained, or None."""
        return self.lora if self.lora.rank or self.lora.path else None

    @property
    def adapter_beside(self) -> LoraConfig | None:
        """The adapter that the generator holds unmerged, or None."""
        return self.adapter if self.lora.publish == "adapter" else None


class MegatronConfig(Section):
    """What makes the Megatron engine faster, by Megatron-Core's names. The defaults are right for most runs."""

    overlap_grad_reduce: MayChange[Literal["auto"] | bool] = "auto"
    """Add gradients up over data-parallel processes while the backward pass goes on. auto: if there are several."""
    overlap_param_gather: MayChange[Literal["auto"] | bool] = "auto"
    """Exchange stepped weights while the next forward pass goes on. auto: if there are several data-parallel processes."""

    pipeline_model_parallel_layout: MayChange[str | None] = None
    """The layers of each pipeline stage, as Et*3|(tt|)*6tL: E embedding, t layer, L output layer. Stages are divided by |, and there are `pipeline_parallel` × `virtual_stages` of them. Default: as even as possible, the last stages shorter."""
    recompute_modules: MayChange[
        list[Literal["core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"]]
    ] = ["core_attn"]
    """What `activation_checkpointing: selective` recomputes. mla_up_proj: latent attention from its latents on, which are far smaller than its heads."""
    moe_token_dispatcher_type: MayChange[Literal["alltoall", "flex"]] = "alltoall"
    """How tokens reach their experts. flex: by DeepEP's kernels; needs deep_ep. Megatron's allgather needs micro-batches of one length."""
    moe_permute_fusion: MayChange[Literal["auto"] | bool] = "auto"
    """Sort tokens by expert with TransformerEngine's kernels. auto: with its layers, where it has them (2.1)."""

    def overlaps(self, copies: int) -> tuple[bool, bool]:
        """Return both settings for so many data-parallel processes."""
        told = (self.overlap_grad_reduce, self.overlap_param_gather)
        reduces, gathers = (copies > 1 if each == "auto" else each for each in told)
        return reduces, gathers


class EngineConfig(Section):
    """How the model is trained."""

    kind: MayChange[Literal["torch", "megatron"] | ExtensionName] = "torch"
    """torch: PyTorch FSDP2 on any number of processes. megatron: Megatron-Core, with pipeline parallelism; needs megatron-core. Or your own class with the methods of `burnish.Engine`: file.py:Class, module:Class, or the name of an installed package's entry point."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: fp32 main weights and optimizer state, bf16 compute, fp32 gradient reduction. fp32: everything in fp32. auto: fp32 on processors without fast products in bf16, else bf16; a run keeps the precision that it began with."""
    tf32: bool = False
    """CUDA: round the factors of fp32 products to 10 bits after the point, which makes them several times as fast. Products in bf16 stay as they are."""
    flash_attention: MayChange[Literal["FA2", "FA3", "FA4"]] = "FA2"
    """CUDA: whose kernels compute attention in bf16. FA2: torch's. FA3, FA4: those of the packages flash_attn_3, for Hopper, and flash-attn-4, for Blackwell."""
    deterministic: MayChange[bool] = False
    """CUDA: add in a fixed order, so that equal runs on equal devices get equal bits. Sums by index and the backward pass of attention get slower. CPUs always do this; vLLM does not."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Clip gradients to this global 2-norm."""
    max_skipped_steps: MayChange[int] = Field(3, ge=1)
    """Stop the run after this many non-finite gradient norms in a row."""
    replicas: MayChange[int] = Field(1, ge=1)
    """torch, HSDP: number of copies of the sharded model. Weights are gathered only among processes / replicas neighbours. Must divide the number of processes."""
    sequence_parallel: MayChange[int] = Field(1, ge=1)
    """Ulysses: number of processes that share the tokens of a micro-batch. A micro-batch may then hold this many times `batch.tokens_per_device`. Must divide the number of attention heads."""
    tensor_parallel: MayChange[int] = Field(1, ge=1)
    """Number of neighbouring processes that share the matrices of each layer and the vocabulary. Must divide the numbers of attention heads and key heads; with megatron it may also be a multiple of the key heads."""
    megatron_sequence_parallel: MayChange[bool] = True
    """megatron, with `tensor_parallel`: each neighbour holds a part of the tokens between matrices, which saves memory. Mixtures of experts need it."""
    pipeline_parallel: MayChange[int] = Field(1, ge=1)
    """megatron: number of pipeline stages that the layers are divided into."""
    virtual_stages: MayChange[int] = Field(1, ge=1)
    """megatron, with `pipeline_parallel`: stages per process. More stages leave less idle time in the pipeline and need more exchanges."""
    expert_parallel: MayChange[int] = Field(1, ge=1)
    """Mixtures of experts: number of processes that share the experts of a layer; each holds whole experts, and tokens go to the processes of their experts. Must divide the number of experts. torch: neighbours among the processes of a copy; weights of experts are gathered only among those that hold the same ones."""
    expert_tensor_parallel: MayChange[int | None] = Field(None, ge=1)
    """megatron, mixtures of experts: number of processes that share the matrices of each expert. Default: `tensor_parallel`."""
    layers: MayChange[Literal["auto", "torch", "transformer_engine"]] = "auto"
    """megatron: whose matrices, norms and experts to use. auto: TransformerEngine's where it is installed, on CUDA in bf16; otherwise torch's. If Apex is installed, torch's use its kernel to add gradients, unless you set torch."""
    megatron: MegatronConfig = MegatronConfig()
    """Speed of the Megatron engine."""
    reshard_after_forward: MayChange[bool] = True
    """torch: free each layer's gathered weights between forward and backward. Costs one more gather."""
    reduce_each_microbatch: MayChange[bool] = True
    """torch: reduce-scatter gradients after every micro-batch. false: once a step, which sends less; until then each process holds the fp32 gradients of the whole model."""
    activation_checkpointing: MayChange[Literal["none", "full", "selective"]] = "none"
    """What the backward pass recomputes. none: nothing. full: whole layers. selective: everything in a layer except matrix products and attention. megatron, selective: only attention and rotary positions (arXiv 2205.05198)."""
    activation_offload: MayChange[bool] = False
    """torch: keep the activations of decoder layers on the host until the backward pass, except those of two layers. Copies overlap with compute."""
    parameter_offload: MayChange[bool] = False
    """torch: keep weights, gradients and optimizer state on the host. A layer's weights come to the device for its passes, and the optimizer steps on the host (FSDP2's CPUOffloadPolicy). It saves most memory and costs most time."""
    optimizer_offload: MayChange[bool] = False
    """Keep the optimizer state on the host. A step brings it to the device in pieces."""
    offload_during_rollout: MayChange[bool] = False
    """rl: move weights, gradients and optimizer state to the host while completions are generated, also those of critic and reference. Evaluations move nothing."""
    compile: bool = False
    """torch: compile each decoder layer with torch.compile. Steps get faster after a first one of a minute or more. Needs a C++ compiler."""
    router_aux_loss: float = Field(0.0, ge=0)
    """Mixtures of experts: weight of the load-balancing loss (arXiv 2101.03961), as config.json's `router_aux_loss_coef`. 0: none. Needs one more forward pass if the experts of a step are not known before it."""
    router_bias_update_rate: float = Field(0.0, ge=0)
    """Mixtures of experts whose routers have a bias, such as DeepSeek-V3's: after each step the bias of every expert with less than the mean load rises by this, and that of every other one falls (arXiv 2408.15664), as by Megatron's `moe_router_bias_update_rate`. 0: biases stay as loaded."""
    logprob_chunk: MayChange[int | None] = Field(None, ge=1)
    """Chunk size, in tokens, for computing logits. The backward pass recomputes the logits of all chunks but the last. Default: as many as give 2²⁸ logits (0.5 GiB in bf16)."""

    @property
    def sharing(self) -> int:
        """Number of processes that share a micro-batch."""
        return self.sequence_parallel * self.tensor_parallel * self.pipeline_parallel

    def logprob_rows(self, vocabulary: int) -> int:
        """Return the chunk size for logits over a vocabulary."""
        return self.logprob_chunk or max(1, _LOGITS_AT_ONCE // vocabulary)

    @property
    def expert_sharing(self) -> int:
        """Number of processes that a layer's experts are divided among."""
        return self.expert_parallel * (self.expert_tensor_parallel or self.tensor_parallel)


class OptimConfig(Section):
    """The optimizer and its learning rate, which is a function of the step alone."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101). muon (arXiv 2502.16982): for the matrices of decoder layers, with adamw for the rest. Both use one learning rate."""
    lr: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """Peak learning rate. auto: 1e-6 for RL and 1e-5 for SFT; with an adapter 1e-5 and 2e-4, since adapters learn best at 10 to 20 times the rate of whole models (Schulman et al. 2025, LoRA Without Regret). A method of your own says its own. The start of a run names the value."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What follows the warm-up. linear, cosine: decay to the end of the run. wsd: constant, then linear decay over `decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] | Share = 0
    """Steps of linear warm-up from 0: a number, or a share of all steps such as 10%, rounded up."""
    decay_steps: Annotated[int, Field(ge=0)] | Share = 0
    """wsd: steps of decay at the end: a number, or a share of all steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The decay ends at this fraction of `lr`."""
    betas: tuple[MomentDecay, MomentDecay] = Field((0.9, 0.999), strict=False)
    """AdamW's decay of first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """How AdamW's moments are kept between steps; a step computes in fp32 either way. bf16: half the memory (arXiv 2412.19437, section 3.3.3); both `betas` must be at most 0.996."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """muon: decay of the momentum."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay. It applies to matrices, not to norms and biases."""

    @property
    def peak_lr(self) -> float:
        """`lr` as a number. A run has replaced auto (`burnish.Method.with_defaults`)."""
        return float(self.lr)


class DataConfig(Section):
    """Data for training and validation: JSON Lines, Parquet, CSV or Arrow files, or data sets of the Hugging Face Hub."""

    train: MayChange[list[str]] = []
    """Files, directories or glob patterns on this machine, ids of data sets of the Hugging Face Hub, or URLs. An id is OWNER/NAME, as openai/gsm8k, or in full OWNER/NAME@REVISION:SUBSET/SPLIT, where either SUBSET or SPLIT may also be alone. A directory may have :SUBSET/SPLIT too. Default: the data set's own subset, and its split train."""
    weights: list[Annotated[float, Field(gt=0)]] = []
    """How often each entry of `train` is drawn, relative to the others: [3, 1] draws three rows of the first for one of the second. Needs `steps`. Default: every row once an epoch."""
    curriculum: str | None = None
    """A column of numbers. Each epoch goes through the rows from small to large numbers; equal ones are shuffled. With - before it, from large to small: -pass_rate begins with the easiest prompts. measured, RL: leave a prompt out more and more often while all its completions get equal rewards in this run; needs `steps`. Default: no such order."""
    streaming: int = Field(0, ge=0)
    """Read `train` during training, in windows of this many megabytes. Use it for data that do not fit on the disk, or that take too long to tokenize first. Each process holds two windows, with `weights` of each entry. Files are shuffled, and rows within a window. Needs `steps`. 0: tokenize all rows before the first step."""
    max_rows: MayChange[int | None] = Field(None, ge=1)
    """Use only the first rows of `train`, so many; with `weights`, of each entry. A run is resumed with the rows that it began with. Default: all."""
    validation: MayChange[list[str]] = []
    """The same as `train`, for validation. Default split: validation, or else test. Or a share, such as 5%: so many rows of `train` are held out, the same ones in every run on these rows; with `weights`, of each entry. Equal rows stay together, so no row is both trained on and validated."""
    prompt_column: str | None = None
    """RL, and prompt/completion data: the column of the prompt, which is text or messages. Default: one of the usual names."""
    completion_column: str | None = None
    """SFT, prompt/completion data: the column of the answer. Default: `completion`."""
    answer_column: str | None = None
    """RL: the column of the ground truth. Default: `answer`, `ground_truth` or verl's `reward_model.ground_truth`."""
    messages_column: str | None = None
    """Chat data: the column of the messages. Default: `messages`."""
    text_column: str | None = None
    """Plain text data: the column of the text. Default: `text`. A column that you name here or above is read whatever other columns there are. Dots lead into nested columns."""
    string_prompts: Literal["raw", "user"] = "raw"
    """How to read a prompt that is a string. raw: as it is, without the chat template, as TRL does. user: as a user's message; reward functions and models then get messages, and a string completion of SFT is the assistant's message."""
    system_prompt: str | None = None
    """A system message for every conversation that does not begin with one, and whose row has none in a column `system`, `system_prompt` or `system_message`."""
    chat_template_name: str | None = None
    """Which of the tokenizer's named chat templates to use. Default: `tool_use` for rows with tools, if there is one, and `default` or the only one for others."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as {enable_thinking: false}, for training and validation. They are not saved with the model: give them again when you use it."""
    max_prompt_length: int | None = Field(None, ge=1)
    """RL: longest prompt, in tokens. Default: no limit."""
    max_length: int | None = Field(None, ge=2)
    """SFT: longest example, in tokens. Default: as many as `batch.tokens_per_device` allows."""
    overlong: Literal["drop", "error"] = "drop"
    """What to do with a prompt or example over its limit. drop: leave it out and count it. error: stop the run before it starts."""
    shuffle: bool = True
    """Draw a new order every epoch, from `seed`."""

    @property
    def held_out(self) -> str:
        """The share of `train` that is its validation, such as "5%"; "" if that has files of its own."""
        text = self.validation[0] if len(self.validation) == 1 else ""
        return text if re.fullmatch(r"\d+(\.\d+)?%", text) else ""


class BatchConfig(Section):
    """The sizes of a step."""

    prompts: int = Field(16, ge=1)
    """RL: prompts per step, over all ranks."""
    examples: int = Field(16, ge=1)
    """SFT: examples per step, over all ranks."""
    minibatches: int = Field(1, ge=1)
    """RL: number of parts of a step's prompts; each gets one optimizer step."""
    epochs: int = Field(1, ge=1)
    """RL: passes over the completions of a step. Each pass has another order and moves the policy further from the one that generated them."""
    tokens_per_device: MayChange[AutoTokens | Annotated[int, Field(ge=2)]] = "auto"
    """Maximum number of tokens in a micro-batch, times `engine.sequence_parallel`. It changes only speed and memory. With a number, a longer sequence is an error. auto: 8192, or what the longest sequence that `data.max_length`, or `data.max_prompt_length` and `rollout.max_response_length`, allow needs; on an accelerator 2, 4 or 8 times that, if by the planner it fits and a step gets quicker. A run records what it was, as auto:32768, and resumes with that on equal devices. Without `data.max_length`, an example then has at most 8192 tokens, times `engine.sequence_parallel`, on all devices."""

    @property
    def is_auto(self) -> bool:
        """Whether `tokens_per_device` is auto, decided or not."""
        return isinstance(self.tokens_per_device, str)

    @property
    def is_decided(self) -> bool:
        """Whether `tokens_per_device` has a number."""
        return self.tokens_per_device != "auto"

    @property
    def tokens(self) -> int:
        """`tokens_per_device` as a number; the least if auto is not decided."""
        given = self.tokens_per_device
        return given if isinstance(given, int) else _auto_tokens(given)


def _auto_tokens(text: str) -> int:
    return max(AUTO_TOKENS, int(text.partition(":")[2] or 0))


class SamplingConfig(Section):
    """How completions are drawn."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits. 0: take the most probable token."""
    top_k: int = Field(0, ge=0)
    """Keep the k most probable tokens. 0: keep all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens that reaches this probability."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less probable than this times the most probable one."""


class RolloutConfig(SamplingConfig):
    """How the policy's completions are generated for training."""

    n: int = Field(8, ge=1)
    """Completions per prompt, which form a group."""
    max_response_length: int = Field(256, ge=1)
    """Maximum length of a completion, in tokens."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """What the model talks with."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a completion, besides the model's end-of-sequence ids. The completion keeps the text and the whole token that completes it: they are trained on, and rewards see them, special tokens too. Rewards never see an end-of-sequence token."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Further token ids that end a completion, such as that of the end of a turn. They stay in it and are trained on."""
    engine: MayChange[Literal["builtin", "vllm", "sglang", "openai"] | ExtensionName] = "builtin"
    """What generates completions. builtin: Burnish's own generator. vllm: vLLM with Burnish's draws; needs `place: child` or `servers`, and vllm. sglang: the same with SGLang; it has run with a stand-in only. openai: an endpoint with OpenAI's API, only for `burnish eval`. Or your own class with the methods of `burnish.Generator`: file.py:Class, module:Class, or the name of an installed package's entry point."""
    url: MayChange[str | None] = Field(None, pattern=r"^https?://[!-~]+$")
    """openai: the endpoint, such as http://localhost:8000/v1. Its key is the environment variable OPENAI_API_KEY, if that is set."""
    model: MayChange[str | None] = None
    """openai: the model, by the endpoint's name for it. `model.tokenizer` only counts tokens."""
    place: MayChange[Literal["inside", "child", "servers"]] = "inside"
    """Where completions are generated. inside: in the training processes, in turns with training. child: in a process beside each of them, so that with `ahead` both work at the same time. servers: by `burnish serve`, on any machine that sees the run's directory."""
    servers: MayChange[int] = Field(1, ge=1)
    """How many servers the run waits for and uses, with `place: servers`."""
    tensor_parallel: MayChange[int] = Field(1, ge=1)
    """vllm, sglang: number of devices that share the model of one generator. With `place: child`, this many processes of a machine share one generator on their devices."""
    timeout_seconds: MayChange[float] = Field(120.0, gt=0)
    """Maximum silence of a generator in another process. A silent generator counts as lost, and the others take over its work. openai: maximum time of a completion."""
    ahead: MayChange[int] = Field(0, ge=0)
    """Generate completions this many steps before they are trained on. The weights after step t - 1 - ahead draw batch t, so `algorithm.mismatch_cap` or `algorithm.mismatch_reject` should correct for their age. A run may be resumed with another number. It first trains on the batches that it has."""
    in_flight: MayChange[bool] = False
    """Load new weights in the middle of completions, so that no generator waits for the end of a step. The weights of a token are at most `ahead` steps old. They depend on timing, so the run cannot be repeated bit for bit. Rows of rollouts say which token is the first of newer weights."""
    max_disagreement: MayChange[Literal["auto"] | Annotated[float, Field(gt=0)] | None] = "auto"
    """Stop the run if generator and engine disagree on the log-probs of the same tokens by more than this, on average, in nats. auto: 0.01 in fp32, where rounding explains 1e-6, and 0.2 in bf16, where it explains 0.03. A single token may differ by 10 times as much in fp32. One that differs by 2.5 times as much in bf16 is named. null: do not compare."""
    check_every: MayChange[int] = Field(100, ge=1)
    """Steps between these comparisons. One is made at every start."""
    slots: MayChange[Literal["auto"] | Annotated[int, Field(ge=1)]] = "auto"
    """Maximum number of sequences that are generated at the same time, per device. auto: 512, or 256, 128 and so on if memory is short. openai: requests at the same time; auto: 32."""


class RewardFunctionConfig(Section):
    """One reward function."""

    function: str
    """`module:function`, `file.py:function`, or a built-in: exact_match, numeric, regex, math_verify, and for programs input_output and unit_tests."""
    weight: float = 1.0
    """Factor on its value in the sum."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments for every call. Under keys for credentials, such as api_key, token or password, a text $NAME stands for that environment variable, and other texts are refused."""
    per_call: int | None = Field(None, ge=1)
    """For a function in TRL's signature: most completions in one call. Calls are then divided over `reward.workers`, and each has its own deadline. A multiple of `rollout.n` keeps the samples of a prompt together. Default: all completions of a process."""


class RewardModelConfig(Section):
    """One model that judges completions."""

    path: str
    """A directory, as a path, a hub's id or a URL, of a sequence or token classification model with one label, and its tokenizer."""
    weight: float = 1.0
    """Factor on its value in the sum."""
    name: str | None = None
    """Name of its part of the reward in metrics and rollouts. Default: the last part of `path`."""

    @property
    def part_name(self) -> str:
        """Its name, or the last part of its path without a revision."""
        return self.name or self.path.rstrip("/").rpartition("/")[2].partition("@")[0]


class RewardConfig(Section):
    """Reward functions and reward models."""

    functions: list[RewardFunctionConfig] = []
    """Reward functions. The reward is the weighted sum of functions and models."""
    models: list[RewardModelConfig] = []
    """Reward models. Each reads prompt and completion in its own chat template; its value at the last token counts."""
    timeout_seconds: MayChange[float] = Field(30.0, gt=0)
    """Deadline of each call, from its start. A late call is an error on its rollouts. A function that is late again and again is not called for the rest of the step. A function in TRL's signature gets all completions of a process in one call, so all of them fail together; `per_call` divides them."""
    workers: MayChange[int] = Field(4, ge=1)
    """Processes that call functions, beside each training process. Each makes one call at a time. One of them makes all calls of an async function."""
    concurrency: MayChange[int] = Field(32, ge=1)
    """Maximum number of calls of an async function at the same time, per training process. A judge on another machine gets up to this many calls from each process."""
    on_error: Literal["drop"] | float = "drop"
    """What a completion gets if a function raises, times out, ends its process or returns NaN, if every function returns None, or if its text is too long for a reward model. drop: it is left out of its group's statistics and of the update, as if it had not been sampled. A number: a failed function or model counts as this value; a conversation whose environment failed is dropped all the same."""
    max_failed_share: MayChange[float] = Field(0.5, gt=0, le=1)
    """Stop the run, after a save, if more than this share of a step's completions is dropped. What is left of such a step was chosen by the failure rather than by the model. 1: never. With a number for on_error, the run also stops if every completion of a step fails."""

    @property
    def part_names(self) -> list[str]:
        """Names of the reward's parts: functions, then models; the second of a name is `name_2`.

        FUNCTION/NAME of verl functions are missing: only answers name them.
        """
        bases = [function.function.rpartition(":")[2] for function in self.functions]
        bases += [model.part_name for model in self.models]
        names: list[str] = []
        for base in bases:
            name = base
            number = 1
            while name in names:
                number += 1
                name = f"{base}_{number}"
            names.append(name)
        return names

    @property
    def given(self) -> bool:
        """Whether there is any function or model."""
        return bool(self.functions or self.models)


class CriticConfig(Section):
    """PPO's critic, for `algorithm.advantage` gae: a second model that learns values. It uses the policy's optimizer and layout."""

    path: str | None = None
    """A directory or hub's id to start it from: a token classification model with one label, or a language model, which gets a new head. Default: the policy's model."""
    lr: float = Field(1e-5, ge=0)
    """Peak learning rate of the critic. The other settings of `optim` apply to it too."""
    lora_rank: int = Field(0, ge=0)
    """Train an adapter of this rank and the head, instead of the whole critic. Its layers and kind are those of `model.lora`, its alpha is auto. 0: all weights are trained."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the beginning in which only the critic learns. The policy and its learning rate's schedule wait."""
    clip: float | None = Field(0.2, gt=0)
    """Keep the critic's values within this distance of those before the update. null: no limit."""


class EvaluationConfig(SamplingConfig):
    """Validation on held-out data. It reads the weights and never changes them."""

    every: Annotated[int, Field(ge=0)] | Epochs = 0
    """Steps between validations, or a part of an epoch: 1 epoch, 1/4 epoch. The last step is always validated. 0: no other."""
    before: bool = True
    """Validate before the first step, if there are held-out data."""
    n: int = Field(1, ge=1)
    """Completions per prompt, for mean@n, pass@n and maj@n. The first reward function scores them."""
    solved: float = 1.0
    """A completion with this score or more is correct, for pass@n."""
    prompts: int | None = Field(None, ge=1)
    """Use only this many prompts or examples, evenly spaced. Default: all."""


class KeepBestConfig(Section):
    """Which checkpoints to keep for their quality."""

    metric: str | None = None
    """A number of the validation, by its name in the log, such as val/loss, val/mean@1 or val/reward. Default: keep none."""
    mode: Literal["min", "max"] | None = None
    """Whether less or more is better. Needed with `metric`."""
    count: int = Field(1, ge=1)
    """How many to keep. Steps that were saved without a validation do not count."""


class CheckpointConfig(Section):
    """When to save and what to keep. A step is deleted if no setting keeps it and it is not pinned."""

    save_every: Literal["auto"] | Annotated[int, Field(ge=0)] | Epochs = "auto"
    """Steps between checkpoints, or a part of an epoch: 1 epoch, 1/4 epoch. auto: save about every 30 minutes, and the steps that keep_every or keep_best asks for. 0: save only at the end. A run that a signal stops is saved in any case."""
    keep_last: int = Field(2, ge=1)
    """Number of newest committed steps to keep."""
    keep_every: int = Field(0, ge=0)
    """Keep every step that this divides. 0: none."""
    keep_best: KeepBestConfig = KeepBestConfig()
    """Keep the best steps by a metric."""
    background: bool = False
    """Save while training continues. Training waits only until weights and optimizer state are copied to host memory, where each process needs room for them. The run waits for its last save."""
    model_dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of the weights in `model/`. bf16: the rest of the fp32 weights is stored with the optimizer state, so a step has the same size either way."""
    fresh_optimizer: bool = False
    """Resume a step without optimizer state, with a fresh optimizer. false: refuse such a step."""
    reserve_gb: float = Field(0.1, ge=0)
    """Disk space, in GB, that must stay free after a save."""
    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """OWNER/NAME: a repository of the Hugging Face Hub that gets the run's model or adapter. A new repository is private. The token is checked before training. If the hub fails, training goes on, and the same command sends the rest."""
    hub_strategy: Literal["end", "every_save"] = "end"
    """With `push_to_hub`. end: send the last step. every_save: send each saved step, while training continues; of several that wait, the newest."""
    mirror: str | None = None
    """A URL: hdfs://, s3://, gs://, file://, or file.py:Class:// with a class of your own. The run's directory is copied to URL/NAME after every save, while training continues. Resuming looks there as well. A step is deleted from the disk only after it has been copied."""
    mirror_keep_last: int = Field(0, ge=0)
    """Number of newest steps to keep on the mirror, besides those that keep_every, keep_best and pins keep. 0: all steps."""
    mirror_patience_seconds: float = Field(1800.0, ge=0)
    """How long the end of a run waits for its mirror. The start waits for each answer of it as long, but no longer than 3 minutes."""


class TracesConfig(Section):
    """Traces of rollouts."""

    local: bool = True
    """Write them to traces/step-N.jsonl.gz, in OTLP's JSON. As with rollouts, the oldest files go first when all take more than `rollouts_keep_gb`."""
    endpoint: str | None = Field(None, pattern=r"^(env|https?://[!-~]+)$")
    """Send them by OTLP over HTTP to a collector, such as http://localhost:4318. env: take the collector from OTEL_EXPORTER_OTLP_ENDPOINT. Other variables OTEL_EXPORTER_OTLP_* apply as well. A URL with credentials is refused."""
    sample_rate: float = Field(0.0, ge=0, le=1)
    """Share of all rollouts that are traced, in addition to the best, worst and random ones of a step. Equal runs trace the same rollouts."""
    max_text: int = Field(4000, ge=0)
    """Maximum number of characters of a text or an input. Longer ones are cut."""
    redact: Literal["off", "texts"] = "off"
    """texts: leave prompts, completions, inputs of rewards and texts of errors out."""


class TrackingConfig(Section):
    """Logs, metrics and rollouts."""

    rollouts_every: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Steps between files of rollouts; those of the first and the last step are written as well. auto: every step of a run of fewer than 50 steps, else every 10th. Unless it is 0, the completions of every validation are written too. 0: none."""
    rollouts_keep_gb: float = Field(5.0, gt=0)
    """Maximum size of rollout files, in GB (10⁹ bytes). The oldest are removed first. The best, worst and some random rollouts of each step, which have their tokens' texts, log-probs and advantages too, are removed last."""
    trackers: list[
        Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"] | ExtensionName
    ] = ["tensorboard"]
    """Services that get the numbers in addition to the console and metrics.jsonl. Or your own classes with the methods of `burnish.Tracker`: file.py:Class, module:Class, or the name of an installed package's entry point. None of them stops or slows the run."""
    traces: TracesConfig = TracesConfig()
    """Traces of rollouts."""
    profile_steps: list[Annotated[int, Field(ge=1)]] = []
    """Steps whose phases each rank writes to profiles/step-N.rank-R.json.gz, for Perfetto or chrome://tracing."""
    torch_profiler: bool = False
    """Run torch's profiler in these steps as well, which makes them slower. Its files end in .torch.json.gz."""
    log_format: Literal["text", "json"] = "text"
    """How the lines of logs/rank-N.log are written. Each has the rank, the step and the phase."""
    console_every: int = Field(1, ge=1)
    """Steps between lines on the console. The first and the last step and every validation have theirs in any case."""
    report: bool = True
    """Write report.html about once a minute, at every checkpoint and at the end, whatever ends the run."""
    progress: bool = True
    """Show progress bars if the terminal can."""
    allocations: bool = False
    """Record which lines of the program allocate an accelerator's memory, for the snapshot that is written when it runs out. Costs about 2 µs per allocation and some hundred MB of host memory."""


class DistributedConfig(Section):
    """Timeouts and restarts."""

    timeout_seconds: float = Field(600.0, gt=0)
    """How long a collective waits for other ranks before the run stops. Also how long a save in the background may neither read nor write before it fails."""
    stall_seconds: float = Field(3600.0, ge=0)
    """If nothing moves on any rank for this time, a training run reports where each rank is, and ends. The same command resumes it. 0: never."""
    max_restarts: int = Field(10, ge=0)
    """How often `--processes` and `--ray` start a run again that failed. torchrun has its own `--max-restarts`."""
    replace_seconds: float = Field(300.0, ge=0)
    """How long a run waits for devices in place of those that it lost."""
    min_processes: int | None = Field(None, ge=1)
    """Elastic: if lost devices are not replaced in time, go on with fewer processes, but at least this many. When devices return, use them again. If the layout does not fit the number of processes, also under torchrun, the planner chooses another. Default: always as many as at the start."""
    check_replicas_every: int = Field(0, ge=0)
    """With engine.replicas: number of steps between bit-for-bit comparisons of the copies of the weights. They are also compared before each save. A difference ends the run and names the ranks: a device has computed or stored wrongly. 0: never."""


class RunConfig(Section):
    """A whole run."""

    name: MayChange[str | None] = None
    """Name of the run's directory. Default: the model's name and the method's, as in Qwen3-0.6B-rl."""
    output_dir: MayChange[str] = "runs"
    """Directory of the run directories. All machines of a run must share it. A URL: they are in runs/ and are copied to the URL, as with checkpoint.mirror."""
    seed: int = Field(0, ge=0)
    """All randomness derives from it."""
    steps: MayChange[int | None] = Field(None, ge=1)
    """Training steps, all of one size. Default: `epochs` over the data. If you extend a run, a decaying learning rate follows the longer schedule from then on."""
    epochs: MayChange[int] = Field(1, ge=1)
    """Passes over the data, if `steps` is not given. Each takes every prompt or example once, so the last step of an epoch may be smaller. With `algorithm.dynamic_sampling`, which takes more prompts: as many steps as full batches of the data would make."""
    resume: MayChange[Literal["auto", "never", "fresh"]] = "auto"
    """auto: continue from the newest committed step of this run. never: refuse if there is one. fresh: rename the run's directory to NAME.1 and begin anew; a restart by torchrun or Slurm continues. The directory of a run that never saved is renamed without being asked if a run with another configuration has its name."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    engine: EngineConfig = EngineConfig()
    """How it is trained."""
    optim: OptimConfig = OptimConfig()
    """The optimizer and its learning rate."""
    data: DataConfig = DataConfig()
    """Data for training and validation."""
    batch: BatchConfig = BatchConfig()
    """The sizes of a step."""
    rollout: RolloutConfig = RolloutConfig()
    """RL: how completions are generated."""
    reward: RewardConfig = RewardConfig()
    """RL: reward functions and reward models."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """RL: the formula."""
    critic: CriticConfig = CriticConfig()
    """RL: PPO's critic."""
    distill: DistillConfig = DistillConfig()
    """RL, SFT: teachers."""
    method: dict[str, Any] = {}
    """`burnish run`: the settings that a method of your own declares."""
    evaluation: MayChange[EvaluationConfig] = EvaluationConfig()
    """Validation on held-out data."""
    checkpoint: MayChange[CheckpointConfig] = CheckpointConfig()
    """When to save, and what to keep."""
    tracking: MayChange[TrackingConfig] = TrackingConfig()
    """Logs, metrics and rollouts."""
    distributed: MayChange[DistributedConfig] = DistributedConfig()
    """Timeouts and restarts."""

    @property
    def microbatch_tokens(self) -> int:
        """Most tokens of a micro-batch, on all devices that share it."""
        return self.batch.tokens * self.engine.sequence_parallel

    def sequence_limit(self, needed: int) -> int:
        """Return the most tokens of sequences that share a micro-batch, of which settings allow `needed`. Where tokens are auto, it is the same on all devices."""
        if not self.batch.is_auto:
            return self.microbatch_tokens
        return max(needed, AUTO_TOKENS * self.engine.sequence_parallel)

    def example_limits(self, sharing: int = 1) -> dict[str, int]:
        """Return the most tokens of one of the `sharing` examples that share a micro-batch, by setting."""
        most = self.data.max_length
        limits = {} if most is None else {"data.max_length": most}
        budget = self.sequence_limit(sharing * (most or 0)) // sharing
        if self.batch.is_auto:  # only a longest example makes it more
            return {"data.max_length": budget} | limits
        shared = ", which two answers share" if sharing > 1 else ""
        return limits | {f"batch.tokens_per_device{shared}": budget}

    @property
    def directory(self) -> Path:
        """The run's local directory."""
        return Path("runs" if is_remote(self.output_dir) else self.output_dir) / self.run_name

    @property
    def run_name(self) -> str:
        """The run's name; by default that of the model, or of its run. A method adds its own (`Method.named`)."""
        if self.name is not None:
            return self.name
        fresh = self.model.fresh
        path = self.rollout.model or self.model.path or ""
        if fresh:
            path = str(fresh.get("model_type", "")) if isinstance(fresh, dict) else fresh
        source = path.partition("/checkpoints/")[0].partition("@")[0].rstrip("/").rpartition("/")[2]
        return re.sub(r"[^\w.-]", "-", source).strip(".-") or "model"

    @property
    def mirror_url(self) -> str | None:
        """The URL of the directory's copy, or None."""
        remote = self.output_dir if is_remote(self.output_dir) else self.checkpoint.mirror
        return None if remote is None else f"{remote.rstrip('/')}/{self.run_name}"

    @property
    def generator_options(self) -> dict[str, Any]:
        """The arguments of a generator that come only where a setting asks for them."""
        options = {
            "tensor_parallel": self.rollout.tensor_parallel
            if self.rollout.tensor_parallel > 1
            else None,
            "experts": self.algorithm.router_replay == "rollout" or None,
            "lora": self.model.adapter_beside,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def has_rewards(self) -> bool:
        """Whether completions get rewards: from functions, models or an environment."""
        return self.reward.given or self.rollout.environment.target is not None

    @property
    def scores(self) -> bool:
        """Whether completions are drawn and judged: by rewards, or by a teacher of drawn tokens."""
        is_taught = bool(self.distill.teachers) and self.distill.tokens == "sampled"
        return self.has_rewards or is_taught

    @property
    def longest_completed(self) -> int:
        """Most tokens of a prompt and its completion. A prompt without limit counts 1, or where tokens are auto as many as it may have in any case."""
        least = _AUTO_PROMPT if self.batch.is_auto else 1
        return self.rollout.max_response_length + (self.data.max_prompt_length or least)


def is_remote(place: str) -> bool:
    """Return whether a setting names a URL."""
    return "://" in place
