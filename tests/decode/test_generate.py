"""Prefill and decode steps against a full recompute and against one another (cases P41, P42, P43, P51)."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.decode import generate
from maxlite.decode.generate import NOTHING, BatchShape, Generator, Programs, padded_length
from maxlite.decode.sampling import build_sampler
from maxlite.model.build import build_model

SHORT, LONG = [9, 8, 7], [5, 4, 3, 2, 1, 11, 12, 13]


def generate_ids(model, params, sampler, prompts, new, end_ids=(), rows=None):
    """The ids of each row and whether it ended, by one Generator."""
    shape = BatchShape(rows or len(prompts), padded_length(max(map(len, prompts))), new)
    generator = Generator(Programs(model, sampler, end_ids, shape), model.unstack(params))
    drawn = np.concatenate(list(generator.stream(prompts)), axis=1)
    return [(row[row != NOTHING].tolist(), bool((row == NOTHING).any())) for row in drawn]


def recomputed_ids(model, params, prompt, new):
    """Greedy ids by running the whole sequence again for every token, without a cache, weights stacked."""
    ids, length = list(prompt), len(prompt) + new

    @jax.jit
    def last_logits(tokens, count):
        positions = jnp.arange(length)[None]
        hidden = model.apply(params, tokens[None], positions, (positions < count).astype(jnp.int32)).hidden
        return model.logits(params, hidden[0, count - 1])

    for _ in range(new):
        tokens = np.zeros(length, np.int32)
        tokens[: len(ids)] = ids
        ids.append(int(jnp.argmax(last_logits(tokens, len(ids)))))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def tiny(tiny_config, noisy_params):
    """A tiny model, its parameters, and the greedy sampler."""
    config = tiny_config()
    model = build_model(config.model, config.compute)
    return model, noisy_params(model), build_sampler(config.decode)


def test_each_row_of_a_batch_equals_that_row_alone(tiny):
    prompts = [SHORT, LONG, [17]]
    together = generate_ids(*tiny, prompts, 8)
    assert together == [generate_ids(*tiny, [prompt], 8)[0] for prompt in prompts]
    assert [len(ids) for ids, _ in together] == [8, 8, 8]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["num_decoder_layers=3", "attention_pattern=[local,full]", "sliding_window_size=8"],
        ["attention_pattern=[local]", "sliding_window_size=1", "logits_via_embedding=false"],
        ["rope_type=llama3", "rope_factor=8", "original_max_position_embeddings=16"],
        [
            "attention_pattern=[local,full]", "sliding_window_size=8", "global_head_dim=24", "global_num_kv_heads=1",
            "share_kv_projections=true", "use_v_norm=true", "use_layer_scalar=true",
        ],
    ],
)  # fmt: skip
def test_cached_equals_full_recompute(tiny_config, noisy_params, overrides):
    config = tiny_config(*overrides)
    model = build_model(config.model, config.compute)
    params = noisy_params(model)
    prompts = [[1, 2, 3, 4, 5, 6], [33]]
    found = generate_ids(model, params, build_sampler(config.decode), prompts, 20)
    assert [ids for ids, _ in found] == [recomputed_ids(model, params, prompt, 20) for prompt in prompts]


def test_long_prompt_runs_in_chunks(tiny, monkeypatch):
    prompts = [list(range(1, 41)), SHORT, list(range(20, 52))]
    whole = generate_ids(*tiny, prompts, 6)
    monkeypatch.setattr(generate, "PREFILL_CHUNK", 16)
    assert padded_length(40) == 48
    assert generate_ids(*tiny, prompts, 6) == whole


def test_any_end_id_stops_its_row_and_no_other(tiny):
    (short, _), (long, _) = generate_ids(*tiny, [SHORT, LONG], 20)
    end = next(token for token in long[3:] if token not in short)
    unused = next(token for token in range(64) if token not in short + long)
    stopped = generate_ids(*tiny, [SHORT, LONG], 20, end_ids=(unused, end))
    assert stopped == [(short, False), (long[: long.index(end)], True)]


def test_end_id_drawn_first_gives_nothing(tiny):
    ((first, *_), _), (long, _) = generate_ids(*tiny, [SHORT, LONG], 5)
    assert first not in long
    assert generate_ids(*tiny, [SHORT, LONG], 5, end_ids=(first,)) == [([], True), (long, False)]


def test_stops_when_all_rows_have_ended(tiny):
    model, params, sampler = tiny
    ((ids, _),) = generate_ids(*tiny, [LONG], generate.MAX_TOKENS_A_CALL)
    end = next(token for token in ids if token != ids[0])
    # Rows without a prompt count as ended.
    generator = Generator(Programs(model, sampler, (end,), BatchShape(4, 16, 100)), model.unstack(params))
    first, second = generator.stream([LONG])
    assert first.ravel().tolist() == [ids[0], NOTHING, NOTHING, NOTHING]
    assert second[0][second[0] != NOTHING].tolist() == ids[1 : ids.index(end)]
    assert (generator.speed.prefill_tokens, generator.speed.decode_tokens) == (8, ids.index(end) - 1)


def test_each_program_compiles_once(tiny, caplog):
    model, params, sampler = tiny
    unstacked = jax.jit(model.unstack)(params)
    with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles():
        generator = Generator(Programs(model, sampler, (), BatchShape(2, 16, 20)), unstacked)
        for prompts in ([SHORT, LONG], [LONG, SHORT], [SHORT]):
            assert np.concatenate(list(generator.stream(prompts)), axis=1).shape == (2, 20)
    compiled = [record.getMessage().split(" in ")[0] for record in caplog.records if "XLA comp" in record.getMessage()]
    assert compiled == ["Finished XLA compilation of jit(prefill)", "Finished XLA compilation of jit(step)"]
