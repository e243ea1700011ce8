"""Take a short name, such as `lora.rank` or `precision`, for the settings that end in it. Only such a name loads this."""

from __future__ import annotations

from burnish.config.foreign_names import foreign_names
from burnish.config.keys import known_keys, plain_name


def full_name(name: str) -> str:
    """Return the one setting or section that ends in `name`; `name` itself if there is none, or more than one.

    A mapping's own keys may follow: `chat_template_kwargs.enable_thinking`.
    """
    head, dot, rest = name.partition(".")
    meant = [each for each in meant_by(name) if "[" not in each]
    if len(meant) == 1:
        return meant[0]
    meant = [each for each in meant_by(head) if "a mapping" in known_keys()[each].values]
    return f"{meant[0]}.{rest}" if dot and len(meant) == 1 else name


def meant_by(name: str) -> list[str]:
    """Return the settings and sections that end in `name`, in the schema's order. A full name means only itself.

    Empty if another framework means something else by it.
    """
    plain = plain_name(name)
    if plain in known_keys():
        return [plain]
    meant = [each for each in known_keys() if each.endswith(f".{plain}")]
    tables = foreign_names()
    elsewhere = tables.renamed.get(plain) or tables.different.get(plain, "").partition(":")[0]
    is_other = plain in tables.absent or (elsewhere and elsewhere not in meant)
    return [] if is_other else meant
