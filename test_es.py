"""Tests of es_llm.py and tasks.py, each of an identity against an independent oracle.

Run `pytest -q`. Models are tiny, random and made on the spot; nothing is downloaded.
"""
import ast
import inspect
import json
import math
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import es_llm
import tasks
from es_llm import Config, Dist, member, mix, noise, load_, perturb_, shape_fitness, update_
from tasks import UserError, load_task

HERE = Path(__file__).parent
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789 .?!<>/+-*=()\n"


# ---- Helpers: a character tokenizer, tiny models of four families, a dense ES


def make_tokenizer(bos=False, eos=True, pad=True, chat=None):
    """One token a character: 0 pad, 1 bos, 2 eos, 3 unk, then CHARS."""
    vocab = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", "<unk>", *CHARS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)])
    special = dict(unk_token="<unk>") | (dict(bos_token="<s>") if bos else {})
    special |= (dict(eos_token="</s>") if eos else {}) | (dict(pad_token="<pad>") if pad else {})
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = chat
    return fast


CHAT = ("{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
VOCAB = 4 + len(CHARS)
FAMILIES = {
    "gpt2": lambda **k: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=2, **k),  # learned, tied
    "llama": lambda **k: transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, **k),
    "qwen2": lambda **k: transformers.Qwen2Config(
        vocab_size=VOCAB + 9, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=True, **k),  # head wider than the tokenizer
    "neox": lambda **k: transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128, **k),
}


def save_tiny(folder, family="llama", dtype=torch.float32, tokenizer=None, std=0.3, **config):
    """A random model whose greedy texts vary, as a Hugging Face folder."""
    config = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0) | config
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**config))
        for p in model.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=std)
    model.to(dtype).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def load(folder, stop=(), **settings):
    cfg = Config(model=str(folder), **{"max_new_tokens": 12, **settings})
    return es_llm.load_model(cfg, stop, torch.device("cpu"))


def greedy(lm, ids, new):
    """Oracle: one prompt, no cache, no padding, argmax of a plain forward pass at a time."""
    ids, out = list(ids), []
    for _ in range(new):
        with torch.no_grad():
            out.append(int(lm.model(torch.tensor([ids])).logits[0, -1].argmax()))
        ids.append(out[-1])
        if out[-1] in (lm.model.generation_config.eos_token_id or ()):
            break
    return out


def params_of(shapes, dtype=torch.float32):
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


def dense_es(theta, w, alpha, seed, t, mirrored=False):
    """Oracle: the update equation in float64, every z materialised."""
    out = {name: p.double().clone() for name, p in theta.items()}
    for n in range(len(w)):
        k, s = (n // 2, (+1, -1)[n % 2]) if mirrored else (n, 1)
        for name in out:
            z = noise(theta[name].shape, seed, t, k, name).double()
            out[name] += alpha / len(w) * float(w[n]) * s * z
    return out


# ---- I. Noise


def test_noise_depends_on_each_part_of_its_key_and_on_nothing_else():
    key = (5, 3, 2, "a.weight")
    first = noise((40, 25), *key)
    state = torch.get_rng_state()
    torch.rand(3)
    assert torch.equal(noise((40, 25), *key), first)
    torch.set_rng_state(state)
    noise((8,), *key)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    for other in [(6, 3, 2, "a.weight"), (5, 4, 2, "a.weight"), (5, 3, 1, "a.weight"),
                  (5, 3, 2, "b.weight"), (5, 2, 3, "a.weight"), (0, 3, 2, "a.weight"),
                  (42, 3, 2, "a.weight")]:
        z = noise((40, 25), *other)
        assert not torch.equal(z, first) and abs(torch.corrcoef(
            torch.stack([z.flatten(), first.flatten()]))[0, 1]) < 0.15
    assert not torch.equal(noise((8,), 5, 3, 2, "a.weight"), noise((8,), 5, 3, 2, "b.weight"))


def test_mix_has_no_collisions_on_a_grid_and_63_bits():
    keys = [(s, t, k, name) for s in range(3) for t in range(30) for k in range(30)
            for name in ("a", "b", "layers.1.weight", "layers.11.weight")]
    values = {mix(*key) for key in keys}
    assert len(values) == len(keys)
    assert 2 ** 62 < max(values) < 2 ** 63 and mix(1, 23) != mix(12, 3) and mix(0) != mix(0, 0)


def test_all_bits_of_a_seed_count(monkeypatch):
    """torch's CPU generator ignores the high 32 bits of a seed; `noise` must not."""
    drawn = {}
    for seed in (3, 3 + (1 << 32), 3 + (3 << 32), (3 << 32), 5 + (5 << 32), 0, 2 ** 63 - 1):
        monkeypatch.setattr(es_llm, "mix", lambda *key, seed=seed: seed)
        drawn[seed] = noise((1 << 16,), 0)
        assert abs(drawn[seed].mean()) < 0.02 and abs(drawn[seed].std() - 1) < 0.02
    matrix = torch.corrcoef(torch.stack(list(drawn.values()))) - torch.eye(len(drawn))
    assert matrix.abs().max() < 0.02


def test_noise_is_standard_normal_with_tails_whatever_the_model_dtype():
    z = noise((1 << 20,), 1)
    moments = [float((z.double() ** p).mean()) for p in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=0.03) and z.abs().max() > 4.2
    params = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    perturb_(params, {"w": torch.zeros(1 << 20)}, 1.0, 9, 1, 0)
    assert torch.equal(params["w"], noise((1 << 20,), 9, 1, 0, "w").to(torch.bfloat16))


SHAPES = {"big": (300, 70), "same": (300, 70), "small": (12,), "scalar": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_restore_is_exact_after_many_members(dtype):
    theta = {n: 0.02 * noise(s, 1, n) for n, s in SHAPES.items()}
    params = params_of(SHAPES, dtype)
    load_(params, theta)
    before = {n: p.clone() for n, p in params.items()}
    pointers = {n: p.data_ptr() for n, p in params.items()}
    for k in range(50):
        perturb_(params, theta, 1e-3, 0, 1, k)
        assert not torch.equal(params["big"], before["big"])
    load_(params, theta)
    assert all(torch.equal(params[n], before[n]) for n in params)
    assert pointers == {n: p.data_ptr() for n, p in params.items()}, "not in place"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_perturb_rounds_the_exact_sum_once(dtype):
    theta = {n: noise(s, 1, n) for n, s in SHAPES.items()}
    params = params_of(SHAPES, dtype)
    perturb_(params, theta, -0.25, 3, 2, 1)
    for n, p in params.items():
        exact = theta[n].double() - 0.25 * noise(SHAPES[n], 3, 2, 1, n).double()
        assert torch.equal(p, exact.float().to(dtype))


def test_bits_do_not_depend_on_threads():
    theta = {n: noise(s, 1, n) for n, s in {"a": (700, 300), "b": (1000,), "c": (9, 9)}.items()}
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        params, copy = ({n: p.clone() for n, p in theta.items()} for _ in range(2))
        perturb_(params, theta, 0.1, 0, 1, 0)
        update_(copy, torch.tensor([1.0, -0.3]), 0.01, 0, 1)
        results.append([*params.values(), *copy.values()])
        assert torch.get_num_threads() == count, "the pool changed the caller's threads"
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_parameters_that_require_grad_can_be_edited():
    layer = torch.nn.Linear(4, 3)
    params = dict(layer.named_parameters())
    theta = {n: p.detach().clone() for n, p in params.items()}
    with torch.enable_grad():
        perturb_(params, theta, 0.1, 0, 1, 0)
        assert load_(params, theta) == 15
        assert load_(params, theta) == 0


def test_small_steps_reach_half_precision_weights_through_theta():
    theta, params = {"w": torch.ones(1)}, {"w": torch.ones(1, dtype=torch.bfloat16)}
    for _ in range(100):
        theta["w"] += 0.0009
        load_(params, theta)
    assert params["w"].item() == pytest.approx(1.09, abs=0.004)


# ---- III. Shaping and the update


@pytest.mark.parametrize("mode", ["zscore", "ranks", "none"])
def test_ties_give_no_weights(mode):
    for F in ([0.1] * 30, [0.7] * 30, [1 / 3] * 8, [4, 4, 4], [1], [0.0] * 5, [-2e5] * 7):
        assert shape_fitness(F, mode).tolist() == [0.0] * len(F)
    nearly = [0.3, 0.1 + 0.2, 0.3]  # differ by rounding only
    assert shape_fitness(nearly, mode).tolist() == [0.0] * 3


def test_shaping_against_worked_examples_and_numpy():
    assert shape_fitness([2, 2, 5], "ranks").tolist() == [-0.25, -0.25, 0.5]
    assert shape_fitness([1, 1, 1, 1, 0, 0], "ranks").tolist() == [.2, .2, .2, .2, -.4, -.4]
    assert shape_fitness([3, 1, 2], "ranks").tolist() == [0.5, -0.5, 0.0]
    assert shape_fitness([0, 1]).tolist() == [-1.0, 1.0]  # population, not sample, deviation
    F = np.random.default_rng(0).normal(5, 2, 40)
    assert np.allclose(shape_fitness(F), (F - F.mean()) / F.std(), atol=1e-12)
    assert np.allclose(shape_fitness(F, "none"), F - F.mean(), atol=1e-12)
    assert shape_fitness(F).dtype == torch.float64
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            shape_fitness([0.2, bad, 0.9])


def test_fitness_ties_members_with_the_same_rewards_in_another_order():
    row = [0.1, 1.1, 0.7, 1e-3, 0.3, 1.05]
    R = torch.tensor([random.Random(i).sample(row, 6) for i in range(50)], dtype=torch.float64)
    assert len({float(x) for x in R.sum(1)}) > 1, "the plain sum is order-dependent here"
    assert shape_fitness(es_llm.fitness(R)).tolist() == [0.0] * 50
    scores = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert es_llm.fitness(scores) == [0.4]


@pytest.mark.parametrize("mirrored", [False, True])
def test_update_agrees_with_a_dense_float64_es(mirrored):
    theta = {n: noise(s, 1, n) for n, s in SHAPES.items()}
    start = {n: p.clone() for n, p in theta.items()}
    w = shape_fitness(np.random.default_rng(1).normal(size=8))
    want = dense_es(theta, w, 0.02, 5, 3, mirrored)
    length = update_(theta, w, 0.02, 5, 3, mirrored)
    for n in theta:
        assert torch.allclose(theta[n].double(), want[n], rtol=0, atol=3e-7)
    exact = math.sqrt(sum(float((want[n] - start[n].double()).square().sum()) for n in theta))
    assert length == pytest.approx(exact, rel=1e-5)


def test_update_sums_small_coefficients_in_float32():
    theta = {"w": torch.zeros(4000)}
    w = torch.tensor([(-1.0) ** (n // 3) for n in range(64)], dtype=torch.float64)
    want = dense_es(theta, w, 64 * 3e-6, 0, 1)["w"]
    update_(theta, w, 64 * 3e-6, 0, 1)
    assert (theta["w"] - want).norm() / want.norm() < 1e-6


def test_no_signal_leaves_the_bits_alone_and_flipping_rewards_flips_the_step():
    theta = {"w": torch.full((50,), -0.0)}
    assert update_(theta, torch.zeros(6), 0.1, 0, 1) == 0.0
    ups, downs = ({"w": torch.zeros(50)} for _ in range(2))
    update_(ups, shape_fitness([1., 5., 2.]), 0.1, 0, 1)
    update_(downs, shape_fitness([-1., -5., -2.]), 0.1, 0, 1)
    assert torch.equal(ups["w"], -downs["w"]) and ups["w"].abs().max() > 0


def test_draws_are_one_a_pair_and_none_for_zero_weights(monkeypatch):
    drawn = []
    monkeypatch.setattr(es_llm, "noise", lambda shape, *key, device: drawn.append(key[2])
                        or torch.ones(shape))
    update_({"w": torch.zeros(2)}, torch.tensor([1.0, -1.0, 0.5, 0.5, 0.0, 2.0]), 0.1, 0, 1, True)
    assert drawn == [0, 2]  # the second pair's weights cancel


def test_a_step_that_is_not_finite_writes_nothing():
    theta = {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match="not finite"):
        update_(theta, torch.tensor([math.nan, 1.0]), 0.1, 0, 1)
    assert torch.equal(theta["w"], torch.zeros(3))


@pytest.mark.parametrize("sigma", [0.01, 0.1])
def test_alpha_has_absorbed_one_over_sigma(sigma):
    """reward = 3 w, a mirrored pair, no scaling: the step is alpha * sigma * 3 * z^2."""
    z = float(noise((1,), 0, 1, 0, "w"))
    theta = {"w": torch.zeros(1)}
    update_(theta, shape_fitness([3 * sigma * z, -3 * sigma * z], "none"), 0.5, 0, 1, True)
    assert float(theta["w"]) / (0.5 * sigma * z * z) == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("shaping", ["zscore", "ranks"])
def test_es_climbs_a_quadratic(shaping, mirrored):
    theta, params = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    for t in range(1, 61):
        F = []
        for n in range(20):
            k, s = member(n, mirrored)
            perturb_(params, theta, s * 0.1, 0, t, k)
            F.append(-float((params["w"] - 2).square().sum()))
        update_(theta, shape_fitness(F, shaping), 0.2, 0, t, mirrored)
    assert ((theta["w"] - 2).abs() < 0.5).all()


@pytest.mark.parametrize("rho", [1.0, 0.3])
def test_table_1_linear_rows_by_monte_carlo(rho):
    """One z-scored update on a linear reward: it moves alpha * rho along the gradient, and
    alpha * sqrt((d - 1) / N) off it; rho = 1 without observation noise."""
    d, N, alpha, trials = 60, 200, 0.5, 60
    g = torch.zeros(d)
    g[7] = 1.0
    rng = np.random.default_rng(3)
    along, off = [], []
    for t in range(trials):
        exact = np.array([float(noise((d,), 0, t, n, "w")[7]) for n in range(N)])
        F = rho * exact + math.sqrt(1 - rho ** 2) * rng.normal(size=N)
        theta = {"w": torch.zeros(d)}
        update_(theta, shape_fitness(F), alpha, 0, t)
        along.append(float(theta["w"] @ g))
        off.append(float((theta["w"] - along[-1] * g).square().sum()))
    assert np.mean(along) == pytest.approx(alpha * rho, rel=0.05)
    assert math.sqrt(np.mean(off)) == pytest.approx(alpha * math.sqrt((d - 1) / N), rel=0.05)


def test_owners_share_every_tensor_once_and_evenly():
    theta = {f"p{i}": torch.empty(s) for i, s in enumerate((5, 400, 30, 390, 10, 7))}
    for world in (1, 2, 3, 8):
        owner = es_llm.owners(theta, world)
        assert owner.keys() == theta.keys() and set(owner.values()) <= set(range(world))
    owner = es_llm.owners(theta, 2)
    loads = [sum(theta[n].numel() for n in theta if owner[n] == r) for r in (0, 1)]
    assert max(loads) - min(loads) <= 10


# ---- II. Models, prompts, greedy decoding


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_greedy_is_one_at_a_time_and_holds_no_prompt(family, tmp_path):
    lm = load(save_tiny(tmp_path, family))
    rows = [{"prompt": "say <answer>8-3</answer> " + "ab c?" * n} for n in (0, 2, 9, 1)]
    examples = es_llm.encode(lm, rows, "auto", "test")
    assert [len(e.ids) for e in examples] == sorted(len(e.ids) for e in examples)
    batch = es_llm.generate(lm, [e.ids for e in examples])
    for example, completion in zip(examples, batch):
        new = greedy(lm, example.ids, 12)
        ended = new[-1] in lm.model.generation_config.eos_token_id
        text = lm.tokenizer.decode(new[:-1] if ended else new)
        assert completion == (text, len(new) - ended, not ended)
        assert es_llm.generate(lm, [example.ids]) == [completion]
    assert len({text for text, *_ in batch}) > 1, "the model says the same to everything"


def test_the_models_own_generation_settings_do_not_leak(tmp_path):
    folder = save_tiny(tmp_path)
    plain = es_llm.generate(load(folder), [[10, 11, 12], [20]])
    transformers.GenerationConfig(
        do_sample=True, temperature=3.0, top_k=7, repetition_penalty=9.0, min_new_tokens=9,
        no_repeat_ngram_size=1, suppress_tokens=list(range(5, 30)), num_beams=1,
        max_length=5, eos_token_id=2).save_pretrained(tmp_path)
    for _ in range(2):
        assert es_llm.generate(load(folder), [[10, 11, 12], [20]]) == plain


def fake(outputs, ends, stop=(), tokenizer=None):
    """An LM whose decoder answers `outputs`, lists of token ids."""
    config = types.SimpleNamespace(pad_token_id=min(ends, default=0), eos_token_id=sorted(ends),
                                   stop_strings=list(stop), max_new_tokens=9)
    answer = lambda input_ids, **_: torch.cat([input_ids, torch.tensor(outputs)], 1)  # noqa: E731
    model = types.SimpleNamespace(generation_config=config, device="cpu", generate=answer)
    return es_llm.LM(model, tokenizer or make_tokenizer(), {}, None)


def test_completions_are_cut_by_position_at_the_first_end():
    a, b, c = (4 + i for i in range(3))
    lm = fake([[a, 2, 2, 2], [a, 3, b, 2], [2, a, b, c], [a, b, c, a]], {2, 3})
    texts = es_llm.generate(lm, [[2, 2, a], [a], [b], [c]])  # prompts that hold end tokens
    assert texts == [("a", 1, False), ("a", 1, False), ("", 0, False), ("abca", 4, True)]


def test_stop_strings_end_their_row_alone(tmp_path):
    stop = [4 + CHARS.index(ch) for ch in "ab.cd"]
    lm = fake([stop, [4 + CHARS.index(ch) for ch in "cdefg"]], {2}, stop=["b."])
    assert [c[0] for c in es_llm.generate(lm, [[5], [6]])] == ["ab.", "cdefg"]
    free = load(save_tiny(tmp_path))
    texts = [c[0] for c in es_llm.generate(free, [[10, 11], [20, 9]])]
    cut = texts[0][2:4]
    lm = load(tmp_path, stop=(cut,))
    for text, (got, _, clipped) in zip(texts, es_llm.generate(lm, [[10, 11], [20, 9]])):
        assert got == (text[:text.find(cut) + 2] if cut in text else text)
        assert not (cut in text and clipped)


def test_all_end_tokens_are_found(tmp_path):
    chat = CHAT.replace("</s>", "<pad>")  # a turn ends with a special token that is not eos
    save_tiny(tmp_path, tokenizer=make_tokenizer(bos=True, chat=chat), eos_token_id=[2, 9])
    lm = load(tmp_path)
    assert lm.model.generation_config.eos_token_id == [0, 2, 9]
    rude = "{{ raise_exception('no') }}"  # a template that refuses other turns has no say
    lm = load(save_tiny(tmp_path / "rude", tokenizer=make_tokenizer(chat=rude)))
    assert lm.model.generation_config.eos_token_id == [2]
    with pytest.raises(UserError, match="test row 0: --chat on: its chat template"):
        es_llm.encode(lm, [{"prompt": "x"}], "on", "test")
    save_tiny(tmp_path / "none", tokenizer=make_tokenizer(eos=False, pad=False),
              eos_token_id=None, pad_token_id=None)
    lm = load(tmp_path / "none")
    assert not lm.model.generation_config.eos_token_id
    (text, tokens, clipped), = es_llm.generate(lm, [[7, 8]])
    assert tokens == 12 and clipped


def test_bos_is_there_once_with_and_without_a_template(tmp_path):
    save_tiny(tmp_path, tokenizer=make_tokenizer(bos=True, chat=CHAT))
    lm = load(tmp_path)
    rows = [{"prompt": "hi"}, {"prompt": [{"role": "user", "content": "hi"}]}]
    for chat in ("auto", "on", "off"):
        raw, messages = sorted(es_llm.encode(lm, rows, chat, "test"))
        assert raw.ids.count(1) == messages.ids.count(1) == 1 == raw.ids.index(1) + 1
        text = {e.index: lm.tokenizer.decode(e.ids) for e in (raw, messages)}
        chatted = "<s><user>hi</s><assistant>"
        assert text == {"auto": {0: "<s>hi", 1: chatted}, "on": {0: chatted, 1: chatted},
                        "off": {0: "<s>hi", 1: "<s>hi"}}[chat]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_auto_is_the_checkpoints_and_buffers_stay(dtype, tmp_path):
    save_tiny(tmp_path, dtype=dtype)
    lm = load(tmp_path)
    assert {p.dtype for p in lm.params.values()} == {dtype}
    assert all(b.dtype == torch.float32 for n, b in lm.model.named_buffers() if "inv_freq" in n)
    assert {p.dtype for p in load(tmp_path, dtype="float32").params.values()} == {torch.float32}


def test_tied_weights_are_perturbed_once(tmp_path):
    lm = load(save_tiny(tmp_path, "gpt2"))
    assert "lm_head.weight" not in lm.params
    assert lm.model.lm_head.weight is lm.params["transformer.wte.weight"]
    theta = {n: p.detach().clone() for n, p in lm.params.items()}
    perturb_(lm.params, theta, 0.1, 0, 1, 0)
    moved = lm.model.lm_head.weight.detach() - theta["transformer.wte.weight"]
    assert float(moved.std()) == pytest.approx(0.1, rel=0.1)


def test_dropout_is_off_and_no_cache_survives_a_change_of_weights(tmp_path):
    lm = load(save_tiny(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    assert not lm.model.training
    theta = {n: p.detach().clone() for n, p in lm.params.items()}
    first = es_llm.generate(lm, [[8, 9, 10]])
    perturb_(lm.params, theta, 0.5, 0, 1, 0)
    assert es_llm.generate(lm, [[8, 9, 10]]) != first
    load_(lm.params, theta)
    assert es_llm.generate(lm, [[8, 9, 10]]) == first


def test_trainable_regex_and_weights_that_are_not_finite(tmp_path):
    folder = save_tiny(tmp_path)
    assert set(load(folder, trainable="norm").params) == {
        n for n, _ in load(folder).model.named_parameters() if "norm" in n}
    for bad, message in (("nothing-like-this", "finds no parameter"), ("(", "unterminated")):
        with pytest.raises(UserError, match=message):
            load(folder, trainable=bad)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[3] = math.nan
    model.save_pretrained(folder)
    with pytest.raises(UserError, match="model.norm.weight"):
        load(folder)


def test_a_model_without_all_its_weights_is_refused(tmp_path):
    """transformers would draw the missing ones at random, other ones in every process."""
    folder = save_tiny(tmp_path)
    headless = transformers.AutoModel.from_pretrained(folder)
    headless.save_pretrained(folder)
    with pytest.raises(UserError, match="lacks weights: .*lm_head.weight"):
        load(folder)


def test_rollout_batch_changes_no_text_in_float32(tiny):
    lm = load(tiny)
    theta = {n: p.detach().clone() for n, p in lm.params.items()}
    rows = [{"prompt": "x" * (1 + 5 * i % 7), "i": i} for i in range(10)]
    examples = es_llm.encode(lm, rows, "auto", "test")
    texts = []
    for size in (3, 7, 10):
        cfg = Config(model=tiny, max_new_tokens=12, rollout_batch=size, population=3, sigma=0.1)
        R, done, _ = es_llm.evaluate_population(lm, theta, range(4), examples, [lengths], cfg, 1,
                                                Dist())
        texts.append([completion.text for completion in done])
        assert R.shape == (4, 10, 1)
        assert R.flatten().tolist() == [float(len(text)) for text in texts[-1]]
    assert texts[0] == texts[1] == texts[2] and texts[0][:10] != texts[0][30:]
    parent = [es_llm.generate(lm, [example.ids])[0].text for example in examples]
    assert texts[0][30:] == parent


def lengths(completions, **_):
    return [float(len(c)) for c in completions]


def test_weights_come_back_after_a_reward_raises(tiny):
    lm = load(tiny)
    theta = {n: p.detach().clone() for n, p in lm.params.items()}
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) > 2:
            raise KeyError("boom")
        return [0.0] * len(completions)

    cfg = Config(model=tiny, max_new_tokens=4, population=4)
    examples = es_llm.encode(lm, [{"prompt": "a"}, {"prompt": "bc"}], "auto", "test")
    with pytest.raises(RuntimeError, match="iteration 1, member 2, row 0") as e:
        es_llm.evaluate_population(lm, theta, range(5), examples, [reward], cfg, 1, Dist())
    assert isinstance(e.value.__cause__, KeyError)
    assert all(torch.equal(p, theta[n]) for n, p in lm.params.items())


def test_tags_that_are_special_tokens_stay_in_the_text():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    first = len(tokenizer) - 2
    lm = fake([[first, 4, first + 1, 2]], {2}, tokenizer=tokenizer)
    assert es_llm.generate(lm, [[5]])[0][0] == "<answer>a</answer>"


def test_the_device_is_the_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert es_llm.pick_device("auto") == torch.device("cuda", 1) and chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="2 GPUs"):
        es_llm.pick_device("cuda")
    assert es_llm.pick_device("cpu") == torch.device("cpu")


# ---- Tasks


def value_of(fn, completion, **columns):
    (value,) = fn(completions=[completion], **{k: [v] for k, v in columns.items()})
    return value


@pytest.mark.parametrize("answer, numbers, target, right", [
    ("6*4", [4, 6], 24, 1), ("6 × 4", [6, 4], 24, 1), ("24 ÷ 3", [24, 3], 8, 1),
    ("9 − 2", [9, 2], 7, 1), ("5·3", [5, 3], 15, 1), ("６+1", [6, 1], 7, 1),
    ("（６＋１）＊2", [6, 1, 2], 14, 1), ("6*4=24", [6, 4], 24, 1), ("6*4 = 24.", [6, 4], 24, 1),
    ("6*4=25", [6, 4], 24, 0), ("6*4=24=24", [6, 4], 24, 0), ("6*4=", [6, 4], 24, 0),
    ("24=6*4", [6, 4], 24, 0), (r"\boxed{6*4}", [6, 4], 24, 1), (r"$6\times4$", [6, 4], 24, 1),
    (r"\frac{8}{2}", [8, 2], 4, 1), (r"\(6 \cdot 4\)", [6, 4], 24, 1),
    (r"\frac{\frac{8}{2}}{4}", [8, 2, 4], 1, 1), (r"\left(8+1\right)\div 3", [8, 1, 3], 3, 1),
    ("6*4\n", [6, 4], 24, 1), ("12 3", [12, 3], 123, 0), ("(4)(2)", [4, 2], 8, 0),
    ("4(2)", [4, 2], 8, 0), ("-3+5", [3, 5], 2, 1), ("+5-3", [3, 5], 2, 1), ("2*-3", [2, 3], -6, 1),
    ("6²", [6], 36, 0), ("62²", [62], 622, 0), ("07+1", [7, 1], 8, 0),
    ("1,000+1", [1000, 1], 1001, 0),
    ("2**3", [2, 3], 8, 0), ("7//2", [7, 2], 3, 0), ("9**9**9**9", [9] * 4, 5, 0),
    ("49*(1/49)", [49, 1, 49], 1, 1), ("2*7", [2, 2, 7], 14, 0), ("2*7", [2, 7], 14, 1),
    ("29/2", [29, 2], 14, 0), ("3*5", [3, 5, 9], 15, 0), ("55/2", [55, 2], "27.5", 1),
    ("800/3", [800, 3], "266.6666666666667", 1), ("800/3", [800, 3], "266.66", 0),
    ("1e1", [1], 10, 0), ("3*5", ["3", 5.0], "15", 1), ("1/(5-5)", [5, 5, 1], 1, 0),
    ("7-3-2*4/8-1", [7, 3, 2, 4, 8, 1], 2, 1), ("x", [1], 1, 0), ("", [1], 1, 0), ("()", [1], 1, 0),
    ("1+", [1], 1, 0), ("(1", [1], 1, 0), ("1)", [1], 1, 0), ("__import__('os')", [1], 1, 0),
    ("1" * 201, [1], 1, 0), ("(" * 90 + "1" + ")" * 90, [1], 1, 1), ("-" * 190 + "1", [1], 1, 1),
    ("٣", [3], 3, 0), ("1=1e999999999", [1], 1, 0)])
def test_countdown_notation(answer, numbers, target, right):
    """Exact values, each number once, and a rule for every notation of faults in public graders."""
    row = dict(numbers=numbers, target=target)
    assert value_of(tasks.countdown_accuracy, f"<answer>{answer}</answer>", **row) == right
    assert value_of(tasks.toy_accuracy, f" {answer}\n", **row) == right


@pytest.mark.parametrize("text, reward, accuracy", [
    ("t</think>\n<answer>6*4-3</answer>", 1.1, 1), ("<answer>6*4-3</answer>", 1.05, 1),
    ("<think>t</think> <answer>6*4-3</answer>\n", 1.1, 1), ("nothing", 0, 0),
    ("t</think>", 0.01, 0),
    ("t</THINK><Answer>6*4-3</ANSWER>", 1.1, 1), ("t</think><answer>6*4+3</answer>", 0.1, 0),
    ("<answer>6*4-3", 0, 0), ("<answer>1+1</answer> wait <answer>6*4-3</answer>", 1.05, 1),
    ("<answer>6*4-3</answer></think>", 0.01, 0), ("<answer></answer>" * 50, 0.05, 0),
    ("<answer>6*4-3</answer> t</think><answer>1</answer>", 0.06, 0),
    ("t</think><answer>6*4-3</answer> more", 1.06, 1),
    ("<answer><answer>6*4-3</answer></answer>", 1.05, 1)])
def test_countdown_reward_is_format_plus_answer(text, reward, accuracy):
    """Tags pay once, and the last answer after the reasoning counts."""
    row = dict(numbers=[4, 6, 3], target="21")
    assert value_of(tasks.countdown_reward, text, **row) == pytest.approx(reward, abs=1e-12)
    assert value_of(tasks.countdown_accuracy, text, **row) == accuracy
    chat = [{"role": "assistant", "content": text}]
    assert value_of(tasks.countdown_reward, chat, **row, id=1) == pytest.approx(reward, abs=1e-12)


def test_any_text_is_scored_quickly():
    rng = random.Random(0)
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "(", ")", "9", "**", "-", "}{",
              "\\frac{"]
    texts = [piece * (100_000 // len(piece)) for piece in pieces]
    texts += ["".join(rng.choices([*pieces, "é", "\n", "\0"], k=3000)) for _ in range(30)]
    texts += ["<answer>" + text for text in texts] + [f"<answer>{t[:190]}</answer>" for t in texts]
    for fn, row in ((tasks.countdown_reward, dict(numbers=[9] * 4, target=5)),
                    (tasks.toy_reward, dict(numbers=[9] * 4, target=5)),
                    (tasks.conciseness_reward, dict(answer="5"))):
        for text in texts:
            start = time.perf_counter()
            assert math.isfinite(value_of(fn, text, **row))
            assert time.perf_counter() - start < 0.5, (fn, text[:60])


def test_generated_countdown_problems_are_solved_by_their_solutions():
    task = load_task("countdown")
    assert (len(task.train), len(task.heldout)) == (200, 2000)
    rows = task.train + task.heldout
    assert len({(*sorted(r["numbers"]), r["target"]) for r in rows}) == 2200
    assert {len(r["numbers"]) for r in rows} == {3, 4}
    texts = [f"ok</think> <answer>{r['solution']}</answer>" for r in rows]
    columns = {k: [r[k] for r in rows] for k in ("numbers", "target")}
    assert tasks.countdown_reward(texts, **columns) == [1.1] * 2200
    for row in rows[:9]:
        assert row["prompt"].endswith("<think>") and str(row["target"]) in row["prompt"]
    assert load_task("countdown").train == task.train != load_task("countdown", seed=1).train
    assert task.defaults == dict(population=30, sigma=1e-3, iterations=500)


def test_the_papers_countdown_file_is_read(tmp_path):
    """Keys context, numbers, target (a text, maybe a decimal), solution; 200 rows to train on."""
    rows = [dict(id=i, context="c", numbers=[98, 47, i, 52], target="27.4", solution="x")
            for i in range(230)]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    task = load_task("countdown", str(tmp_path / "c.json"))
    assert (len(task.train), len(task.heldout)) == (200, 30) and "27.4" in task.train[0]["prompt"]
    for bad in ({"numbers": [1, 2]}, {"numbers": 3, "target": 1}, {"numbers": ["x"], "target": 1}):
        (tmp_path / "c.json").write_text(json.dumps([rows[0], bad]))
        with pytest.raises(UserError, match="row 1"):
            load_task("countdown", str(tmp_path / "c.json"))


def test_toy_and_conciseness_have_disjoint_rows():
    toy, short = load_task("toy"), load_task("conciseness")
    key = lambda row: (*sorted(row["numbers"]), row["target"])  # noqa: E731
    assert not set(map(key, toy.train)) & set(map(key, toy.heldout)) and len(toy.heldout) >= 1000
    assert all(value_of(tasks.toy_reward, row["solution"], **{k: row[k] for k in (
        "numbers", "target")}) == 1 for row in toy.train[:200] + toy.heldout[:200])
    assert (len(short.train), len(short.heldout)) == (2, 8)
    assert value_of(tasks.conciseness_reward, "The city is Paris.", answer="Paris") == -13
    assert value_of(tasks.conciseness_accuracy, " Paris\n", answer="Paris") == 1


def test_a_reward_with_a_file_holds_a_tenth_out_and_no_prompt_twice(own, tmp_path):
    spec, file = f"{own / 'own.py'}:reward", tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i % 30}", "want": "x"}) + "\n"
                            for i in range(40)))
    task = load_task(spec, str(file))
    assert load_task(spec, str(file)).train == task.train != load_task(spec, str(file), 1).train
    assert {r["prompt"] for r in task.train}.isdisjoint(r["prompt"] for r in task.heldout)
    assert len(task.train) == 36
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "want": "x"}) + "\n" for i in range(3)))
    task = load_task(spec, str(file))
    assert (len(task.train), len(task.heldout)) == (2, 1)


# ---- The whole program


OWN = '''
from tasks import Task

def reward(completions, want, **_):
    """Share of the characters of `want` in the completion."""
    return [sum(c in text for c in w) / len(w) for text, w in zip(completions, want)]

def trl(prompts, completions, want, **kwargs):
    return [float(w in c[0]["content"]) for c, w in zip(completions, want)]

def tied(completions, **_):
    return [0.7] * len(completions)

def make_task(seed):
    rows = [{"prompt": f"{a}+{b}=", "want": "abcxyz"[b:] + str(a)}
            for a in range(10) for b in range(3)]
    return Task("own", rows[:20], rows[20:], reward, reward, 8, (), dict(sigma=0.05, alpha=0.025))

def raises(completions, want, **_):
    if "7" in want[0] and len(completions[0]) >= 0 and len(want) == 1:
        raise ZeroDivisionError("the real reason")
    return [1 / (w != "7") for w in want]

def short(completions, **_): return [0.0]
def none(completions, **_): return [None] * len(completions)
def scalar(completions, **_): return 3.0
def array(completions, *args, **kwargs): import numpy; return numpy.zeros(len(completions))
def nan(completions, **_): return [float("nan")] * len(completions)
def text(completions, **_): return ["1"] * len(completions)
def needs(completions, gold): return [0.0] * len(completions)
def string_stop(): return Task("s", [{"prompt": "a"}], [], none, none, 8, "ab", {})
def no_setting(): return Task("s", [{"prompt": "a"}], [], none, none, 8, (), {"sigmoid": 1})
def no_choice(): return Task("s", [{"prompt": "a"}], [], none, none, 8, (), {"shaping": "rank"})
'''


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    (folder / "rows.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i}?", "want": str(i)}) + "\n" for i in range(12)))
    (folder / "chat.jsonl").write_text("".join(json.dumps(
        {"prompt": [{"role": "user", "content": f"{i}?"}], "want": str(i % 3)}) + "\n"
        for i in range(12)))
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": c}\n')
    return folder


def argv(tiny, own, out, fn="make_task", data=None, **flags):
    flags = dict(iterations=3, population=5, batch=6, eval_every=2, max_new_tokens=8) | flags
    named = [f"--{k}={v}" for k, v in flags.items()]
    return ["--model", tiny, "--task", f"{own / 'own.py'}:{fn}", "--out", str(out), *named,
            *(["--data", str(own / data)] if data else [])]


def metrics(out, kind):
    rows = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def weights(out):
    return (Path(out) / "model" / "model.safetensors").read_bytes()


def launch(world, args, threads="1", script=HERE / "es_llm.py", flags=()):
    """The program under torchrun, as users start it."""
    env = os.environ | dict(OMP_NUM_THREADS=threads, PYTHONPATH=str(HERE))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={world}", *flags, str(script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, cwd=HERE)


def test_any_number_of_ranks_gives_the_same_bytes(tiny, own, tmp_path):
    for world in (1, 2, 3, 8):
        done = launch(world, argv(tiny, own, tmp_path / str(world), rollout_batch=4))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("   1/3 |") == 1
    base = weights(tmp_path / "1")
    assert all(weights(tmp_path / str(world)) == base for world in (2, 3, 8))
    timing = {"seconds", "seconds_rollout", "seconds_perturb", "seconds_update", "kind",
              "tokens_per_second", "eta_seconds", "peak_memory_bytes"}
    for kind in ("train", "eval"):
        one = [{k: v for k, v in row.items() if k not in timing}
               for row in metrics(tmp_path / "1", kind)]
        for world in (2, 3, 8):
            assert one == [{k: v for k, v in row.items() if k not in timing}
                           for row in metrics(tmp_path / str(world), kind)]
    assert base != Path(tiny, "model.safetensors").read_bytes()


def test_an_error_on_one_rank_ends_all_and_is_printed_once(tiny, own, tmp_path):
    start = time.time()
    done = launch(2, argv(tiny, own, tmp_path / "o", "raises", "rows.jsonl", batch=0))
    assert done.returncode != 0 and time.time() - start < 60
    assert done.stderr.count("ZeroDivisionError: the real reason") == 1
    assert re.search(r"iteration 1, (the parent|member \d), row 7: the reward raised", done.stderr)


def run_here(args):
    assert es_llm.main(args) == 0


def test_the_program_counts_evaluates_and_saves(tiny, own, tmp_path, capsys):
    out = tmp_path / "o"
    run_here(argv(tiny, own, out, iterations=5))
    assert [r["iteration"] for r in metrics(out, "train")] == [1, 2, 3, 4, 5]
    assert [r["iteration"] for r in metrics(out, "eval")] == [0, 2, 4, 5]
    assert len(metrics(out, "run")) == len(metrics(out, "end")) == 1
    row = metrics(out, "train")[0]
    assert row["reward_min"] <= row["reward_mean"] <= row["reward_max"] and row["tokens"] > 0
    assert 0 <= row["frac_better"] <= 1 and 0 < row["frac_moved"] <= 1 and row["update_norm"] > 0
    assert json.loads((out / "config.json").read_text())["alpha"] == 0.025
    console = capsys.readouterr()
    assert "ETA" in console.out and "before:" in console.out and "iteration" not in console.err
    # The saved folder answers as the log's last evaluation says.
    lm = load(out / "model", max_new_tokens=8)
    last = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()][-1]
    ids = lm.tokenizer(last["prompt"])["input_ids"]
    assert es_llm.generate(lm, [ids])[0][0] == last["text"]
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / "model" / file).read_bytes() == Path(tiny, file).read_bytes()


def test_measurement_changes_nothing(tiny, own, tmp_path):
    run_here(argv(tiny, own, tmp_path / "a", eval_every=1))
    run_here(argv(tiny, own, tmp_path / "b", eval_every=0))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert not metrics(tmp_path / "b", "eval")
    run_here(argv(tiny, own, tmp_path / "c", seed=1))
    assert weights(tmp_path / "c") != weights(tmp_path / "a")


def test_tied_rewards_leave_the_model_as_it_was(tiny, own, tmp_path, capsys):
    run_here(argv(tiny, own, tmp_path / "o", "tied", "rows.jsonl"))
    assert weights(tmp_path / "o") == Path(tiny, "model.safetensors").read_bytes()
    assert all(r["update_norm"] == 0 == r["frac_moved"] for r in metrics(tmp_path / "o", "train"))
    warned = [w["text"] for w in metrics(tmp_path / "o", "warning")]
    assert sum("all offspring are tied" in w for w in warned) == 1
    assert capsys.readouterr().out.count("all offspring are tied") == 1


def test_when_an_evaluation_is_due():
    def at(every, last):
        return [t for t in range(last + 1) if es_llm.due(t, every, last)]

    assert at(2, 6) == [0, 2, 4, 6] and at(1, 3) == [0, 1, 2, 3] and at(0, 6) == []
    assert at(7, 6) == [0, 6] and at(4, 6) == [0, 4, 6]


def test_warnings_for_collapse_and_clipping():
    texts = list(es_llm.warnings([0.0, 0.001, 0.0], 0.5, 0.6))
    assert len(texts) == 2 and "--sigma is too large" in texts[0] and "--max-new-tokens" in texts[1]
    assert not list(es_llm.warnings([0.45, 0.451, 0.45], 0.4, 0.4))  # above their parent
    assert not list(es_llm.warnings([0.1, 0.2, 0.3], 0.35, 0.5))  # the paradox
    assert not list(es_llm.warnings([0.10, 0.11, 0.10], 0.18, 0.5))
    assert ["tied" in text for text in es_llm.warnings([0.3, 0.3], 0.3, 0)] == [True]


@pytest.mark.parametrize("shaping", ["zscore", "ranks", "none"])
def test_one_iteration_is_the_equation(tiny, own, tmp_path, shaping):
    """The saved weights are those of a dense ES on rewards found by the argmax oracle."""
    out = tmp_path / "o"
    run_here(argv(tiny, own, out, iterations=1, population=4, batch=0, shaping=shaping)
             + ["--mirrored"])
    lm = load(tiny, max_new_tokens=8)
    spec = tasks.load_task(f"{own / 'own.py'}:make_task")
    theta = {n: p.detach().clone() for n, p in lm.params.items()}
    F = []
    for n in range(4):
        for name, p in lm.params.items():
            z = noise(p.shape, 0, 1, n // 2, name)
            p.data.copy_(theta[name] + (0.05, -0.05)[n % 2] * z)
        rewards = []
        for row in spec.train:
            new = greedy(lm, lm.tokenizer(row["prompt"])["input_ids"], 8)
            rewards += spec.reward([lm.tokenizer.decode([i for i in new if i != 2])], [row["want"]])
        F.append(sum(rewards) / len(rewards))
    assert len(set(F)) > 1
    want = dense_es(theta, shape_fitness(F, shaping), 0.025, 0, 1, True)
    got = {n: p.detach() for n, p in load(out / "model").params.items()}
    assert max((got[n].double() - want[n]).abs().max() for n in want) < 1e-6
    row = metrics(out, "train")[0]
    assert row["reward_mean"] == pytest.approx(np.mean(F)) and row["unique"] == len(set(F))


def test_a_trl_reward_runs_unchanged_on_conversations(own, tmp_path):
    folder = save_tiny(tmp_path / "m", tokenizer=make_tokenizer(bos=True, chat=CHAT))
    run_here(argv(folder, own, tmp_path / "o", "trl", "chat.jsonl", sigma=0.1, iterations=1))
    assert metrics(tmp_path / "o", "train")


def test_the_readmes_own_task_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "my_task.py").write_text(code)
    folder = save_tiny(tmp_path / "m", tokenizer=make_tokenizer(bos=True, chat=CHAT))
    run_here(["--model", folder, "--task", f"{tmp_path / 'my_task.py'}:make_task", "--batch", "4",
              "--out", str(tmp_path / "o"), "--iterations", "1", "--population", "3"])
    assert metrics(tmp_path / "o", "eval")[0]["n"] == 31


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_half_precision_runs_and_saves_its_own_dtype(family, own, tmp_path):
    folder = save_tiny(tmp_path / "m", family, dtype=torch.bfloat16)
    run_here(argv(folder, own, tmp_path / "o", iterations=1))
    lm = load(tmp_path / "o" / "model")
    assert {p.dtype for p in lm.params.values()} == {torch.bfloat16}
    base, new = (transformers.AutoTokenizer.from_pretrained(f) for f in
                 (folder, tmp_path / "o" / "model"))
    assert base.get_vocab() == new.get_vocab()


@pytest.mark.parametrize("flags, message", [
    (dict(population=1), "--population is 1: give a number from 2"),
    (dict(sigma=-1), "--sigma is -1.0"),
    (dict(sigma="nan"), "--sigma is nan"),
    (dict(sigma="x"), "--sigma"),
    (dict(iterations=-1), "--iterations is -1"),
    (dict(dtype="int8"), "--dtype"),
    (dict(no_such_flag=1), "no-such-flag"),
    (dict(trainable="zzz"), "--trainable 'zzz' finds no parameter"),
    (dict(chat="on"), "--chat on"),
    (dict(max_new_tokens=126), "training row 0: its prompt has 4 tokens"),
    (dict(model="/no/such/model"), "--model /no/such/model cannot be loaded"),
    (dict(task="no_such_task"), "no_such_task"),
    (dict(task="no_such_file.py:f"), "no_such_file.py"),
])
def test_bad_settings_get_one_sentence(flags, message, tiny, own, tmp_path, capsys):
    assert es_llm.main(argv(tiny, own, tmp_path / "o", **flags)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and message in said
    assert not (tmp_path / "o").exists()


def test_odd_mirrored_population_and_used_out_folder(tiny, own, tmp_path, capsys):
    assert es_llm.main(argv(tiny, own, tmp_path / "o") + ["--mirrored"]) == 2
    assert "--mirrored: --population is odd" in capsys.readouterr().err
    (tmp_path / "keep").write_text("precious")
    assert es_llm.main(argv(tiny, own, tmp_path)) == 2
    assert "not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["keep"]


@pytest.mark.parametrize("fn, data, message", [
    ("short", "rows.jsonl", "returned '[0.0]', where"), ("scalar", "rows.jsonl", "returned '3.0'"),
    ("array", "rows.jsonl", "returned '[0. 0.]'"), ("none", "rows.jsonl", "returned 'None'"),
    ("nan", "rows.jsonl", "returned 'nan'"), ("text", "rows.jsonl", "returned '1'"),
    ("needs", "rows.jsonl", "row 0"), ("missing", "rows.jsonl", "missing"),
    ("reward", "empty.jsonl", "empty.jsonl"), ("reward", None, "--data"),
    ("reward", "nowhere.jsonl", "nowhere.jsonl"), ("reward", "broken.jsonl", "line 3"),
    ("string_stop", None, "a tuple stop"),
    ("no_choice", None, "shaping is 'rank'")])
def test_bad_rewards_and_rows_are_named(fn, data, message, tiny, own, tmp_path, capsys):
    assert es_llm.main(argv(tiny, own, tmp_path / "o", fn, data)) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_default_that_is_no_setting_keeps_its_traceback(tiny, own, tmp_path):
    with pytest.raises(TypeError, match="sigmoid"):
        es_llm.main(argv(tiny, own, tmp_path / "o", "no_setting"))


def test_a_function_that_is_reward_and_accuracy_is_called_once(tiny):
    lm, calls = load(tiny, max_new_tokens=4), []
    reward = lambda completions, **_: calls.append(1) or [0.5] * len(completions)  # noqa: E731
    task = tasks.Task("t", [{"prompt": "a"}], [{"prompt": "b"}], reward, reward, 4, (), {})
    theta = {n: p.detach().clone() for n, p in lm.params.items()}
    examples = es_llm.encode(lm, task.heldout, "auto", "test")
    row, _ = es_llm.evaluate(lm, theta, task, examples, Config(max_new_tokens=4), 1, Dist())
    assert len(calls) == 1 and row["reward"] == row["accuracy"] == 0.5 and row["stderr"] == 0


def test_flags_take_dashes_and_underscores_and_help_lists_all(capsys):
    assert es_llm.parse(["--max_new_tokens", "5", "--eval-every=3", "--mirrored"]) == dict(
        max_new_tokens=5, eval_every=3, mirrored=True)
    assert es_llm.parse(["--data", "a_b.jsonl"]) == dict(data="a_b.jsonl")
    with pytest.raises(SystemExit) as e:
        es_llm.main(["--help"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    for field in inspect.signature(Config).parameters:
        assert "--" + field.replace("_", "-") in text


def test_a_run_needs_no_argument(tmp_path, monkeypatch, capsys):
    """The default model and task, after two steps of warm-up in place of all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build = tasks.tiny_model
    monkeypatch.setattr(es_llm, "tiny_model", lambda: build(steps=2))
    monkeypatch.chdir(tmp_path)
    run_here(["--iterations=1", "--population=4", "--batch=8", "--eval-size=16"])
    folder, = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("toy-tiny-") and metrics(folder, "eval")[0]["n"] == 16


def test_import_touches_nothing():
    code = ("import sys; import es_llm; "
            "assert not {'transformers', 'datasets'} & set(sys.modules); "
            "import torch; assert not torch.distributed.is_initialized()")
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True)


# ---- Size and style


# ---- Faults: runs that are killed, stopped, starved of disk, or spread over ranks


TIMING = {"seconds", "seconds_rollout", "seconds_perturb", "seconds_update", "tokens_per_second",
          "eta_seconds", "peak_memory_bytes"}
LOGGED = ("iteration", "F", "theta", "tokens", "clipped")


def result(out):
    """What must not depend on kills: model, seed log, train and eval lines without timings."""
    rows = [{k: v for k, v in row.items() if k not in TIMING}
            for kind in ("train", "eval") for row in metrics(out, kind)]
    return weights(out), (Path(out) / "seeds.jsonl").read_bytes(), rows


def fault(name, nth, act):
    """The nth call of es_llm's function `name` in this process does act(*its arguments)."""
    original, calls = getattr(es_llm, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(es_llm, name, wrapped)


def kill(*_, **__):
    os.kill(os.getpid(), 9)


def kill_in_the_middle_of_a_checkpoint(theta, file, metadata):
    file.write_bytes(b"half of it")
    kill()


def kill_in_the_middle_of_a_line(file, line):
    with open(file, "ab") as f:
        f.write(es_llm.dump([line]).encode()[:70])
    kill()


def kill_in_the_middle_of_a_model(lm, folder):
    lm.model.save_pretrained(folder)
    kill()


def limit_files(*_, **__):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def limit_this_log(file, line):
    size = file.stat().st_size + 40
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def ask_to_end(*_, **__):
    os.kill(os.getpid(), 15)


def ask_twice(*_, **__):
    ask_to_end()
    time.sleep(1.1)
    ask_to_end()


def spoil(theta, *_, **__):
    theta[min(theta)].view(-1)[3] += 1e-3


def sleep(*_, **__):
    time.sleep(5)


def forked(world, args, faults=()):
    """The program in `world` new processes -> their exit codes. faults: (rank, name, nth, act)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for rank in range(world):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                if world > 1:
                    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                for who, *what in faults:
                    if who == rank:
                        fault(*what)
                code = es_llm.main(args)
            except SystemExit as e:
                code = e.code
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    codes = {}
    for _ in children:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # as torchrun does when a process fails
            for other in set(children) - codes.keys():
                os.kill(other, 15)
    return [codes[pid] for pid in children]


def in_fresh_process(code, *args):
    """Forking is safe only where torch has started no threads yet."""
    env = os.environ | dict(OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE"):
        env.pop(name, None)
    return subprocess.run([sys.executable, "-c", f"from test_es import *\n{code}", *map(str, args)],
                          env=env, capture_output=True, text=True, timeout=200, cwd=HERE)


KILLS = [  # function, which of its calls, what happens there; 4 iterations, checkpoints at 2 and 4
    ("generate", 1, kill), ("generate", 15, kill),  # in the first evaluation; in the rollouts
    ("append", 4, kill_in_the_middle_of_a_line),  # of the seed log
    ("update_", 2, kill), ("update_", 3, kill),  # after the seed log, before the step
    ("load_checkpoint", 1, kill),
    ("evaluate", 3, kill),
    ("save_file", 1, kill_in_the_middle_of_a_checkpoint),
    ("save_file", 2, kill_in_the_middle_of_a_checkpoint),
    ("save_model", 1, kill_in_the_middle_of_a_model),  # the trial save
    ("save_model", 2, kill_in_the_middle_of_a_model)]


def kill_and_resume(tiny, own, base):
    settings = dict(iterations=4, save_every=2)
    es_llm.generate(load(tiny), [[5]])  # imports what each child would
    assert forked(1, argv(tiny, own, f"{base}/whole", **settings)) == [0]
    whole = result(f"{base}/whole")
    for world in (1, 2):
        for i, (name, nth, act) in enumerate(KILLS):
            args = [*argv(tiny, own, f"{base}/{world}-{i}", **settings), "--resume"]
            on_rank_0 = name in ("append", "save_file", "save_model", "load_checkpoint")
            rank = 0 if on_rank_0 else i % world
            codes = forked(world, args, [(rank, name, nth, act)])
            assert codes[rank] == -9, (world, name, nth, codes)
            assert forked(3 - world, args) == [0] * (3 - world)  # on another number of ranks
            assert result(args[5]) == whole, (world, name, nth)
    assert forked(1, args) == [0] and result(args[5]) == whole  # resuming what has ended


def test_killed_anywhere_and_resumed_gives_the_same_bytes(tiny, own, tmp_path):
    done = in_fresh_process("kill_and_resume(sys.argv[1], *map(Path, sys.argv[2:]))", tiny, own,
                            tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def end_and_resume(tiny, own, base):
    """Signals and full disks: (fault, exit code, what is said); then the same bytes on resuming."""
    settings = dict(iterations=4, save_every=2)
    es_llm.generate(load(tiny), [[5]])
    assert forked(1, argv(tiny, own, f"{base}/whole", **settings)) == [0]
    whole = result(f"{base}/whole")
    for world in (1, 2):
        for i, (name, nth, act, code, iteration) in enumerate([
                ("generate", 9, ask_to_end, 143, 1), ("update_", 3, ask_to_end, 143, 3),
                ("evaluate", 2, ask_to_end, 143, 2), ("update_", 4, ask_twice, 143, 2),
                ("save_checkpoint", 2, limit_files, 2, 2), ("append", 6, limit_this_log, 2, 0),
                ("agree", 2, spoil, 2, 0)]):
            if (act in (limit_files, limit_this_log) and world == 2  # rank 0 alone has a disk
                    or act == spoil and world == 1):  # and no other to differ from
                continue
            args = [*argv(tiny, own, f"{base}/{world}-{i}", **settings), "--resume"]
            codes = forked(world, args, [(world - 1, name, nth, act)])
            assert code in codes, (world, i, codes)
            file = Path(args[5], "checkpoint", "theta.safetensors")
            if iteration and (world == 1 or name != "generate"):
                with safetensors.safe_open(file, "pt") as f:
                    assert int(f.metadata()["iteration"]) == iteration, (world, i)
            assert forked(world, args) == [0] * world
            assert result(args[5]) == whole, (world, i)
    args = argv(tiny, own, f"{base}/slow", **settings)
    for minutes, codes in ((0.04, {1}), (1, {0})):
        args = argv(tiny, own, f"{base}/{minutes}", **settings, timeout_minutes=minutes)
        assert set(forked(2, args, [(1, "update_", 2, sleep)])) == codes


def test_signals_full_disks_and_ranks_that_differ_lose_nothing(tiny, own, tmp_path):
    done = in_fresh_process("end_and_resume(sys.argv[1], *map(Path, sys.argv[2:]))", tiny, own,
                            tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stderr.count("File too large") == 2 and "rank 1 has other weights" in done.stderr
    assert done.stdout.count("stopped after iteration") == 6


def test_a_resumed_run_generates_nothing_again(tiny, own, tmp_path, monkeypatch):
    args = [*argv(tiny, own, tmp_path / "o", save_every=2), "--resume"]
    run_here(args)
    whole = result(tmp_path / "o")
    (tmp_path / "o/checkpoint/theta.safetensors").unlink()  # then the seed log stands in for it
    log = tmp_path / "o/metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True)
                           if '"kind": "train", "iteration": 3' not in line))
    monkeypatch.setattr(es_llm, "generate", None)
    run_here(args)
    assert result(tmp_path / "o") == whole
    assert metrics(tmp_path / "o", "train")[-1]["tokens_per_second"] == 0


def test_more_iterations_give_what_they_would_have_at_once(tiny, own, tmp_path):
    run_here(argv(tiny, own, tmp_path / "once", iterations=4, check_every=3))
    run_here(argv(tiny, own, tmp_path / "twice", iterations=2, check_every=3))
    run_here([*argv(tiny, own, tmp_path / "twice", iterations=4, check_every=3, save_every=1),
              "--resume"])
    assert result(tmp_path / "once") == result(tmp_path / "twice")


@pytest.mark.parametrize("flags, message", [
    (dict(sigma=0.5), "sigma was 0.05 and is 0.5"),
    (dict(seed=1, batch=5), "seed was 0 and is 1; batch was 6 and is 5"),
    (dict(iterations=2), "has already done 3"), (dict(fn="tied"), "task was"),
    (dict(dtype="bfloat16"), "dtype was float32 and is bfloat16; base was")])
def test_resuming_with_what_changes_the_result_is_refused(flags, message, tiny, own, tmp_path,
                                                          capsys):
    out = tmp_path / "o"
    run_here(argv(tiny, own, out))
    data = "rows.jsonl" if "fn" in flags else None
    args = [*argv(tiny, own, out, data=data, **flags), "--resume"]
    before = result(out)
    assert es_llm.main(args) == 2
    assert message in capsys.readouterr().err and result(out) == before
    assert es_llm.main(argv(tiny, own, out)) == 2  # and without --resume nothing is touched
    assert "not empty" in capsys.readouterr().err and result(out) == before


def test_replay_builds_any_iteration_from_the_log_and_the_base_model(tiny, own, tmp_path, capsys):
    run_here([*argv(tiny, own, tmp_path / "o", population=4, shaping="ranks"), "--mirrored"])
    seeds = tmp_path / "o/seeds.jsonl"

    def replay(name, *flags, log=seeds, model=tiny):
        return es_llm.main(["--replay", str(log), "--model", str(model), "--out",
                            str(tmp_path / name), *flags])

    assert replay("all") == 0 and weights(tmp_path / "all") == weights(tmp_path / "o")
    assert (tmp_path / "all/seeds.jsonl").read_bytes() == seeds.read_bytes()
    for k in (1, 2):
        assert replay(f"{k}", f"--iterations={k}") == 0
        assert es_llm.main([*argv(tiny, own, tmp_path / f"run{k}", population=4, shaping="ranks",
                                  iterations=k), "--mirrored"]) == 0
        assert weights(tmp_path / f"{k}") == weights(tmp_path / f"run{k}")
    assert len(seeds.read_bytes()) < 3000

    first, *lines = seeds.read_text().splitlines(True)
    line = json.loads(lines[0])
    wrong = es_llm.dump([line | {"F": [f + n % 2 for n, f in enumerate(line["F"])]}])
    other = save_tiny(tmp_path / "other", std=0.31)
    capsys.readouterr()
    for i, (log, model, message) in enumerate([
            (first.replace(torch.__version__, "1.0") + "".join(lines), tiny, "torch was 1.0"),
            (first.replace('"machine": "cpu', '"machine": "gpu') + "".join(lines), tiny, "machine"),
            (first + "".join(lines), other, "base was"),
            (first + wrong + "".join(lines[1:]), tiny,
             "after iteration 1, the seed log has other weights"),
            (first, tiny, "has 0 iterations"), ("{}\n", tiny, "has 0 iterations"),
            ("no log\n", tiny, "is damaged")]):
        (tmp_path / "log").write_text(log)
        assert replay(f"bad{i}", log=tmp_path / "log", model=model) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / f"bad{i}/model").exists()
    assert replay("bad", "--iterations=4") == 2
    assert "has 3 iterations" in capsys.readouterr().err


def test_damage_and_what_cannot_be_saved_are_found_at_once(tiny, own, tmp_path, capsys, monkeypatch):
    args = [*argv(tiny, own, tmp_path / "o", save_every=2), "--resume"]
    run_here(args)
    file = tmp_path / "o/checkpoint/theta.safetensors"
    good = file.read_bytes()
    for bad in (good[:-100], good[:-1] + bytes([good[-1] ^ 1])):
        file.write_bytes(bad)
        assert es_llm.main(args) == 2 and "is damaged: delete it" in capsys.readouterr().err
    assert es_llm.main(argv(tiny, own, "/proc/no")) == 2  # a folder that cannot be made
    assert "--out cannot be read or written" in capsys.readouterr().err
    assert es_llm.main(argv(tiny, own, file / "below")) == 2
    assert "--out cannot be read or written" in capsys.readouterr().err
    assert not (tmp_path / "o/seeds.trial").exists()
    usage = types.SimpleNamespace(free=10_000)
    monkeypatch.setattr(es_llm.shutil, "disk_usage", lambda path: usage)
    assert es_llm.main(argv(tiny, own, tmp_path / "full")) == 2
    assert "the model and two checkpoints need" in capsys.readouterr().err


def test_weights_and_logits_that_are_not_finite_stop_the_run(tiny, own, tmp_path, capsys,
                                                             monkeypatch):
    assert es_llm.main(argv(tiny, own, tmp_path / "step", alpha=9e37)) == 2
    assert re.search(r"\w+: its step is not finite: lower --alpha", capsys.readouterr().err)
    with torch.no_grad():
        monkeypatch.setattr(es_llm, "perturb_", lambda params, *_: params.popitem()[1].fill_(
            math.nan))
        assert es_llm.main(argv(tiny, own, tmp_path / "logit")) == 2
    assert "logits are not finite" in capsys.readouterr().err
    for bad in (math.nan, math.inf):
        with pytest.raises(UserError, match="logits"):
            es_llm.guard(None, torch.tensor([[0.0, bad], [1.0, 2.0]]))
    masked = torch.tensor([[0.0, -math.inf]])
    assert es_llm.guard(None, masked) is masked
    assert not (tmp_path / "logit/model").exists()


def test_a_folder_of_something_else_is_left_alone(tiny, own, tmp_path, capsys):
    for name in ("model", "trial", "checkpoint"):
        (tmp_path / "o" / name).mkdir(parents=True)
        (tmp_path / "o" / name / "precious").write_text("mine")
    before = sorted(str(f) for f in (tmp_path / "o").rglob("*"))
    assert es_llm.main([*argv(tiny, own, tmp_path / "o"), "--resume"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert sorted(str(f) for f in (tmp_path / "o").rglob("*")) == before
    seeds = tmp_path / "run/seeds.jsonl"
    run_here(argv(tiny, own, tmp_path / "run"))
    log = seeds.read_bytes()
    assert es_llm.main(["--replay", str(seeds), "--model", tiny, "--resume", "--out",
                        str(tmp_path / "run"), "--iterations=1"]) == 2
    assert seeds.read_bytes() == log


def test_a_seed_log_with_a_gap_or_behind_its_checkpoint_is_refused(tiny, own, tmp_path, capsys):
    args = [*argv(tiny, own, tmp_path / "o", save_every=2), "--resume"]
    run_here(args)
    seeds = tmp_path / "o/seeds.jsonl"
    first, *lines = seeds.read_text().splitlines(True)
    for kept, message in [([lines[0], *lines[2:]], "lacks an iteration"),
                          (lines[:1], "is ahead of its seeds.jsonl"), ([], "is ahead of its seeds")]:
        seeds.write_text("".join([first, *kept]))
        assert es_llm.main(args) == 2 and message in capsys.readouterr().err
    seeds.unlink()
    assert es_llm.main(args) == 2 and "is not empty" in capsys.readouterr().err
    seeds.write_text("".join([first, *lines[:2], *lines, *lines[1:]]))  # two processes wrote it
    run_here(args)
    assert seeds.read_text() == "".join([first, *lines])


def test_frozen_weights_and_rows_belong_to_the_origin_of_a_run(tiny, own, tmp_path, capsys):
    base = dict(fn="reward", trainable="self_attn")
    run_here(argv(tiny, own, tmp_path / "o", data="rows.jsonl", **base))
    other = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] *= -1
    other.save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    args = argv(str(tmp_path / "other"), own, tmp_path / "o", data="rows.jsonl", **base)
    assert es_llm.main([*args, "--resume"]) == 2 and "base was" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text((own / "rows.jsonl").read_text().replace(
        '"want": "3"', '"want": "4"'))
    args = argv(tiny, own, tmp_path / "o", data=tmp_path / "rows.jsonl", **base)
    assert es_llm.main([*args, "--resume"]) == 2 and "rows was" in capsys.readouterr().err


def test_warnings_and_samples_are_not_repeated_by_a_resumed_run(tiny, own, tmp_path):
    args = [*argv(tiny, own, tmp_path / "o", save_every=1), "--resume"]
    run_here(args)
    log, samples = tmp_path / "o/metrics.jsonl", tmp_path / "o/samples.jsonl"
    texts, shown = [w["text"] for w in metrics(tmp_path / "o", "warning")], samples.read_text()
    log.write_text("".join(line for line in log.read_text().splitlines(True)
                           if '"kind": "eval", "iteration": 3' not in line))
    run_here(args)  # as if killed between the samples and their evaluation
    assert [w["text"] for w in metrics(tmp_path / "o", "warning")] == texts and texts
    assert samples.read_text() == shown


def test_digest_sees_every_bit_and_no_other(tiny):
    theta = {n: noise(s, 1, n) for n, s in SHAPES.items()}
    digest = es_llm.digest(theta)
    assert digest == es_llm.digest({n: p.clone() for n, p in theta.items()})
    for name, p in theta.items():
        p.view(-1).view(torch.int32)[-1] ^= 1
        assert es_llm.digest(theta) != digest
        p.view(-1).view(torch.int32)[-1] ^= 1
    assert es_llm.digest(theta) == digest
    theta["big"], theta["same"] = theta["same"], theta["big"]
    assert es_llm.digest(theta) != digest


RESTART = """
from test_es import *
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    fault("update_", 3, kill)
sys.exit(es_llm.main(sys.argv[1:]))
"""


def test_a_restart_on_one_host_does_not_meet_addresses_of_the_dead(monkeypatch):
    """torchrun hosts one store for all attempts; what one wrote must not be read by the next."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda url: iter([(store, 0, 1)]))
    for name, value in dict(RANK=0, WORLD_SIZE=1, GROUP_WORLD_SIZE=1).items():
        monkeypatch.setenv(name, str(value))
    seen = []
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda backend, store, **_: seen.append(store))
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert Dist.start(1) == (0, 1)
        seen[-1].set("address", attempt)
    assert [s.get("address") for s in seen] == [b"0", b"1"]


def test_torchrun_restarts_a_run_by_itself(tiny, own, tmp_path):
    assert launch(1, argv(tiny, own, tmp_path / "whole", iterations=4)).returncode == 0
    (tmp_path / "restart.py").write_text(RESTART)
    args = [*argv(tiny, own, tmp_path / "o", iterations=4), "--resume"]
    done = launch(2, args, script=tmp_path / "restart.py", flags=["--max-restarts=3"])
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "o") == result(tmp_path / "whole")
    assert len(metrics(tmp_path / "o", "run")) == 2


def ip(*args, host=None):
    where = ["ip", "netns", "exec", host] if host else []
    return subprocess.run([*where, "ip", *args], capture_output=True)


@pytest.fixture
def hosts():
    """Two network namespaces on this machine that see each other as 10.9.8.1 and 10.9.8.2."""
    names = [f"es{os.getpid()}{side}" for side in "ab"]
    if not shutil.which("ip") or os.geteuid() or ip("netns", "add", names[0]).returncode:
        pytest.skip("needs root, iproute2 and network namespaces")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "es0", "netns", names[0], "type", "veth", "peer", "name", "es1",
           "netns", names[1])
        for i, name in enumerate(names):
            ip("addr", "add", f"10.9.8.{i + 1}/24", "dev", f"es{i}", host=name)
            ip("link", "set", f"es{i}", "up", host=name)
            ip("link", "set", "lo", "up", host=name)
        if subprocess.run(["ip", "netns", "exec", names[0], "ip", "route", "get", "10.9.8.2"],
                          capture_output=True).returncode:
            pytest.skip("no veth devices here")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def test_two_hosts_give_the_same_bytes_as_one_process(hosts, tiny, own, tmp_path):
    assert launch(1, argv(tiny, own, tmp_path / "one")).returncode == 0
    running = []
    for i, host in enumerate(hosts):  # each with a folder of its own: nothing is shared
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={i}",
                   "--nproc_per_node=2", "--master_addr=10.9.8.1", "--master_port=29500",
                   str(HERE / "es_llm.py"), *argv(tiny, own, tmp_path / f"host{i}")]
        env = os.environ | dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=f"es{i}")
        running.append(subprocess.Popen(["ip", "netns", "exec", host, *command], env=env, cwd=HERE,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [process.communicate(timeout=120)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert result(tmp_path / "host0") == result(tmp_path / "one")
    assert not (tmp_path / "host1").exists()


def test_files_keep_their_size_and_old_pythons_can_read_them():
    for name, lines in (("es_llm.py", 700), ("tasks.py", 350), ("README.md", 250)):
        text = (HERE / name).read_text(encoding="utf-8").splitlines()
        assert len(text) <= lines, f"{name} has {len(text)} lines"
        if name.endswith(".py"):
            assert max(map(len, text)) <= 100, f"{name} is too wide"
            tree = ast.parse("\n".join(text), feature_version=(3, 10))
            for node in ast.walk(tree):
                if name == "es_llm.py" and isinstance(node, ast.FunctionDef) and node.name != "run":
                    assert node.end_lineno - node.lineno < 45, f"{node.name} is too long"
                assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                            and node.func.id in ("eval", "exec")), name
