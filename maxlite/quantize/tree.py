"""Parts of a nested dict of parameters, by paths as group_0/layers/block_0/attention/query."""

from typing import Any

from maxlite.model.build import Params


def has_path(params: Params, path: str) -> bool:
    """Returns whether there is something at a path."""
    node: Any = params
    for step in path.split("/"):
        if not isinstance(node, dict) or step not in node:
            return False
        node = node[step]
    return True


def at_path(params: Params, path: str) -> Any:
    """Returns what is at a path."""
    node: Any = params
    for step in path.split("/"):
        node = node[step]
    return node


def with_path(params: Params, path: str, new: Any) -> Params:
    """Returns the parameters with something else at a path; the rest is shared with those given."""
    first, _, rest = path.partition("/")
    return params | {first: with_path(params[first], rest, new) if rest else new}
