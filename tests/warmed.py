"""What every process of a test would compute anew, and needs: imported by the servers that fork such processes."""

from __future__ import annotations

import codecs
import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # compiles 600 regular expressions, once
codecs.lookup("idna")  # which every name of a host asks for
gc.collect()
gc.freeze()  # a collection in a fork would copy every page that it looks at
