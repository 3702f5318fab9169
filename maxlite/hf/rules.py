"""What a family's table is made of: which tensors of the files hold which of our parameters."""

import dataclasses
import re

from maxlite.hf.transforms import Transform


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of the files (or one a layer, or one an expert) and the parameters it holds.

    tensor: its name in the files. `{layer}` stands for the number of the layer. `{expert}` stands for the number of
        the expert, and then the parameter's own first dimension is the experts'.
    path: our parameter, or several that share the tensor. With `{layer}` in `tensor` it is relative to that layer's
        block, unless it begins with `group_`; otherwise it is absolute.
    float32: the files hold it in float32 whatever the dtype of the others.
    where: parameters that a layer must have besides; for names that two kinds of layers share.

    A rule whose parameters a layer does not have does not apply to that layer.
    """

    tensor: str
    path: str | tuple[str, ...]
    transform: Transform
    float32: bool = False
    where: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Our parameters, also if it is one."""
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Tensors of the files that are knowingly not read.

    pattern: regular expression for the whole name.
    reason: why they do not matter.
    """

    pattern: str
    reason: str

    def matches(self, tensor: str) -> bool:
        """Whether `tensor` is one of them."""
        return re.fullmatch(self.pattern, tensor) is not None


@dataclasses.dataclass(frozen=True)
class Table:
    """All rules of a family.

    name: what messages call the family.
    rules: the tensors that are read and written.
    ignored: those that may be in a folder and are not read.
    copies: tensor -> the tensor that it may only repeat: `lm_head.weight` of a model with tied embeddings. It is not
        written, and if it is in the files it must be equal.
    spellings: (regular expression, replacement) pairs for names that other versions wrote: applied to the names in
        the files before they are looked up.
    """

    name: str
    rules: tuple[Rule, ...]
    ignored: tuple[Ignored, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
