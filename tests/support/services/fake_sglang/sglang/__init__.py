"""A stand-in for SGLang, made from the source of SGLang 0.5.23, for machines that cannot run it.

It has what Burnish calls: the same signatures, the same answers, and what can go wrong. Transformers' model computes; keys and values
are kept over requests until they are flushed. All is in one process, but what SGLang sends between processes is serialized.
"""

from sglang.srt.entrypoints.engine import Engine

__version__ = "0.5.23"
__all__ = ["Engine"]
