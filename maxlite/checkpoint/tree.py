"""Pytrees of arrays as the nested dicts that a checkpoint stores, whatever their containers are in memory."""

from collections.abc import Mapping
from typing import Any

import jax

from maxlite.errors import CheckpointError

ArrayShape = tuple[tuple[int, ...], Any]

_MOST_NAMED = 5


def leaf_paths(tree: Any) -> dict[str, Any]:
    """Returns slash-joined path -> leaf, in the tree's own order: `params/embedding`, `opt_state/0/mu/embedding`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the tree have one path"
    return named


def nested(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts with the leaves of `paths`; the inverse of leaf_paths up to the kinds of container."""
    tree: dict[str, Any] = {}
    for path, leaf in paths.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def check_shapes(saved: Mapping[str, ArrayShape], wanted: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError if the arrays of a checkpoint are not those wanted, parameters named first."""
    problems = [
        f"{path} is {list(saved[path][0])} in the checkpoint and {list(leaf.shape)} now"
        for path, leaf in wanted.items()
        if path in saved and tuple(saved[path][0]) != tuple(leaf.shape)
    ]
    problems += [f"{path} is not in the checkpoint" for path in wanted if path not in saved]
    problems += [f"{path} is in the checkpoint but not used now" for path in saved if path not in wanted]
    if not problems:
        return
    problems.sort(key=lambda problem: not problem.startswith("params/"))
    more = len(problems) - _MOST_NAMED
    listed = problems[:_MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
    raise CheckpointError(
        f"{source} does not fit this config:\n  " + "\n  ".join(listed) + "\nSet the keys of the model "
        "(emb_dim, num_decoder_layers, ...) and opt_type as they were when it was saved, or leave that checkpoint "
        "alone: another run_name begins anew, another load_parameters_path reads another one."
    )
