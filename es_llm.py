"""Evolution Strategies (ES) for fine-tuning language models: all parameters, no backpropagation.

Each iteration perturbs the weights with N seeded noises, decodes the same prompts greedily with
every perturbed model, scores the completions, and steps along the weighted sum of the noises:

    theta  <-  theta + (alpha / N) * sum_n  w_n * s_n * z_n

    theta   the weights in float32, the "parent"; params: the same, rounded to the model's dtype
    z_n     N(0, I), a function of (seed, iteration, noise index, parameter name), never stored
    s_n     +1; or +1 and -1 for the two members of a mirrored pair, which share one z
    F_n     fitness: the mean reward of the "offspring" theta + s_n * sigma * z_n
    w_n     step weight: by default the z-score of F_n among the N members
    sigma   size of a perturbation;   alpha: size of a step, which has absorbed 1 / sigma

This is Algorithm 2 of "Evolution Strategies at Scale" (Qiu et al., arXiv 2509.24372), except that
1. weights are restored by writing round(theta), not by subtracting the noise again, which drifts;
2. theta is float32 whatever the model's dtype, so that no small step is rounded away;
3. every parameter has its own noise, where the published code gives tensors of one shape the same;
4. every rank updates a share of the tensors and broadcasts it, where one rank updates them all;
5. the parent is scored beside its offspring, as a measurement;
6. only the completion is scored, where some published scripts score prompt and completion.

    python es_llm.py                                                     # no GPU, no download
    python es_llm.py --model Qwen/Qwen2.5-0.5B-Instruct                  # one GPU, Countdown
    torchrun --standalone --nproc_per_node=8 es_llm.py --model Qwen/Qwen2.5-3B-Instruct

--out receives config.json, metrics.jsonl, samples.jsonl and model/, a Hugging Face folder.
Guaranteed: exact restore; noise without collisions or global state; the same bits for any number
of ranks (float32, one kind of device, as many threads a rank); no step without a signal; measuring
never changes a run. Not guaranteed: bits on another device; in half precision, text with another
--rollout-batch. Not here: sampling, adapters, quantised weights, models larger than one device.
"""
import argparse
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import random
import re
import resource
import shutil
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Literal, NamedTuple, get_args

import torch
from jinja2 import TemplateError
from tqdm import tqdm

from tasks import Task, UserError, call_reward, load_task, tiny_model

# ---- Settings: one field is one flag; the parser and --help read types and comments from here. ---
@dataclasses.dataclass(frozen=True)
class Config:
    # -- what to train
    model: str = "tiny"  # Hugging Face folder or hub id; tiny: a small model made here
    task: str = ""  # built-in name, or file.py:function; default: toy for tiny, else countdown
    data: str = ""  # rows for the task: a .json or .jsonl file
    out: str = ""  # folder for results, new or empty; default: runs/TASK-MODEL-TIME
    seed: int = 0  # of noise, data order and generated problems
    chat: Literal["auto", "on", "off"] = "auto"  # chat template: for message lists, always, never
    trainable: str = ""  # regex: only parameters whose name it finds move; default: all
    # -- the method
    population: int = 30  # N, offspring an iteration
    sigma: float = 1e-3  # standard deviation of the perturbations
    alpha: float = 0  # step size, 1 / sigma absorbed; 0: sigma / 2
    iterations: int = 500  # T
    batch: int = 0  # training prompts an iteration, the same for all members; 0: all
    shaping: Literal["zscore", "ranks", "none"] = "zscore"  # from fitness to step weights
    mirrored: bool = False  # members 2k and 2k+1 use +z_k and -z_k
    # -- rollouts
    max_new_tokens: int = 0  # length limit of a completion, in tokens; 0: the task's
    rollout_batch: int = 128  # completions decoded together
    # -- machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's
    theta_device: Literal["same", "cpu"] = "same"  # cpu: theta, 4 bytes a weight, in host memory
    timeout_minutes: float = 180  # how long a rank waits for the others
    # -- measurement
    eval_every: int = 10  # iterations between evaluations on held-out rows; 0: never
    eval_size: int = 0  # held-out rows to evaluate on; 0: all

    def __post_init__(self):
        for name, low in dict(population=2, sigma=1e-30, alpha=0, iterations=0, batch=0,
                              max_new_tokens=0, rollout_batch=1, timeout_minutes=1e-3,
                              eval_every=0, eval_size=0).items():
            if not low <= getattr(self, name) < math.inf:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give a "
                                f"number from {low}")
        for f in dataclasses.fields(self):
            if get_args(f.type) and getattr(self, f.name) not in get_args(f.type):
                raise UserError(f"{f.name} is {getattr(self, f.name)!r}: give {get_args(f.type)}")
        try:
            re.compile(self.trainable)
        except re.error as e:
            raise UserError(f"--trainable {self.trainable!r} is no regular expression: {e}") from e
        if self.mirrored and self.population % 2:
            raise UserError(f"--population is {self.population}, but --mirrored makes pairs: give "
                            "an even number")

def parse(argv: list[str]) -> dict[str, Any]:
    """The flags that were given, by field name. Raises UserError; --help prints and exits."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message} (see --help)")

    parser = Parser(allow_abbrev=False, description=__doc__.partition("\n")[0] + " Defaults are in "
                    "[ ]; those of a built-in task come first.")
    types = {f.name: f.type for f in dataclasses.fields(Config)}
    for line in inspect.getsource(Config).splitlines():
        if heading := re.match(r"    # -- (.+)", line):
            group = parser.add_argument_group(heading[1])
        elif field := re.match(r"    (\w+): .+ = (.+)  # (.+)", line):
            name, default, text = field.groups()
            kind = (dict(choices=get_args(types[name])) if get_args(types[name]) else
                    dict(action=argparse.BooleanOptionalAction) if types[name] is bool else
                    dict(type=types[name], metavar=types[name].__name__.upper()))
            group.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS,
                               help=f"{text} [{default}]", **kind)
    dashed = [re.sub(r"^--\w+", lambda m: m[0].replace("_", "-"), arg) for arg in argv]
    return vars(parser.parse_args(dashed))

# ---- Ranks: the processes of a run. Without torchrun there is one, and nothing communicates. -----
@dataclasses.dataclass(frozen=True)
class Dist:
    rank: int = 0
    world: int = 1

    @staticmethod
    def start(timeout_minutes: float) -> "Dist":
        """Joins torchrun's group: gloo for tensors and objects in host memory, nccl for CUDA."""
        if "RANK" not in os.environ:
            return Dist()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
        return Dist(torch.distributed.get_rank(), torch.distributed.get_world_size())

    def gather(self, fn: Callable[[], Any]) -> list:
        """Runs fn() on every rank -> all results, by rank, the same list everywhere.

        If it raises on any rank, the first such rank prints the error and all exit. Otherwise
        the rest would wait for that rank until the timeout and report a network failure.
        """
        if self.world == 1:
            return [fn()]
        result = error = None
        try:
            result = fn()
        except Exception as e:
            error = f"error: {e}" if isinstance(e, UserError) else traceback.format_exc()
        everyone = [None] * self.world
        torch.distributed.all_gather_object(everyone, (result, error))
        failed = [rank for rank, (_, text) in enumerate(everyone) if text]
        if failed:
            if self.rank == failed[0]:
                print(f"rank {self.rank}: {error}", file=sys.stderr, flush=True)
            torch.distributed.all_gather_object(everyone, None)  # nobody exits before it is out
            raise SystemExit(1)
        return [result for result, _ in everyone]

    def rank0_first(self, fn: Callable[[], Any]) -> Any:
        """fn(), on rank 0 before the others, who then find its download or cache complete."""
        mine = []
        for turn in (self.rank == 0, self.rank != 0):
            self.gather(lambda: mine.append(fn()) if turn else None)
        return mine[0]

def pick_device(name: str) -> torch.device:
    """The device of this process; a GPU is the one numbered LOCAL_RANK. Raises UserError."""
    have = dict(cuda=torch.cuda.is_available(), cpu=True,  # mps has no collectives
                mps=torch.backends.mps.is_available() and "RANK" not in os.environ)
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if have[kind])
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if not have[name] or name == "cuda" and local >= count:
        raise UserError(f"--device {name} is not there for process {local} of this host, which has "
                        f"{count} GPUs: start fewer processes, or use --device cpu")
    if name != "cuda":
        return torch.device(name)
    torch.cuda.set_device(local)
    return torch.device(name, local)

def clock(device: torch.device) -> float:
    """Seconds, read once the device has done all that was asked of it."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()

# ---- I. Noise and weights: each z is a pure function of its key; weights are only ever written. --
def mix(*key: int | str) -> int:
    """Integers and names -> 63 bits that depend on each, on their order and their number."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

def noise(shape, *key: int | str, device="cpu") -> torch.Tensor:
    """N(0, I) float32 of `shape`, on `device`: the same whenever the key is, on one kind of device.

    Always float32 and the whole tensor, as what `randn` draws depends on dtype and size. A CPU's
    generator reads 32 bits of a seed, too few for the millions of draws of a run. It is linear
    over bits (mt19937): the XOR of two states gives the XOR of their streams. So there is a state
    for each half of the key, one of them a word further, lest equal halves cancel.
    """
    seed = mix(*key)
    rng = torch.Generator(device).manual_seed(seed)
    if rng.device.type == "cpu":
        state = rng.manual_seed(seed & 0xFFFFFFFF).get_state()
        high = torch.Generator().manual_seed(seed >> 32).get_state()
        state[24:5016] ^= high[24:5016].roll(8)  # the 624 words of a state, 8 bytes each
        rng.set_state(state)
    return torch.randn(shape, generator=rng, device=device)

def member(n: int, mirrored: bool) -> tuple[int, int]:
    """Member n's noise index k and sign s: its weights are theta + s * sigma * z_k."""
    return (n // 2, 1 - 2 * (n % 2)) if mirrored else (n, 1)

@functools.lru_cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

def for_each(fn: Callable[[str], Any], tensors: dict[str, torch.Tensor], device) -> list:
    """[fn(name) of each tensor], the largest first; on a CPU by as many threads as torch has.

    `randn` fills a tensor with one thread and without the GIL, so several are drawn at a time. Each
    thread has one torch thread (as have those started later): no result depends on their number.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].numel())
    if torch.device(device).type != "cpu":
        return [fn(name) for name in names]
    return list(thread_pool(torch.get_num_threads()).map(fn, names))

def perturb_(params, theta, scale: float, *key: int) -> None:
    """Writes params = round(theta + scale * z), tensor by tensor.

    params, theta: tensors by name, theta float32. scale: s * sigma. key: (seed, iteration, noise
    index). Extra memory: one float32 tensor (two if theta is elsewhere); on a CPU one a thread.
    """
    @torch.no_grad()
    def write(name):
        p = params[name]
        z = noise(p.shape, *key, name, device=p.device)
        p.copy_(torch.add(theta[name].to(p.device), z, alpha=scale, out=z))

    for_each(write, params, next(iter(params.values())).device)

def load_(params, theta) -> int:
    """Writes params = round(theta) -> how many of the weights had another value before."""
    @torch.no_grad()
    def write(name):
        p = params[name]
        rounded = theta[name].to(p.device, p.dtype)
        changed = int(torch.count_nonzero(rounded != p))  # a sum would copy it as int64
        p.copy_(rounded)
        return changed

    return sum(for_each(write, params, next(iter(params.values())).device))

# ---- II. Rollouts and rewards: greedy completions of the same prompts by every member. -----------
class LM(NamedTuple):
    model: torch.nn.Module  # load_model replaces its generation_config
    tokenizer: Any
    params: dict[str, torch.Tensor]  # trainable parameters by name, tied ones once
    folder: Path  # the base model's files

class Example(NamedTuple):
    index: int  # of the row in its list
    row: dict
    ids: list[int]  # the prompt's tokens

class Rollout(NamedTuple):
    member: int  # n, or N for the parent
    index: int  # of the example
    text: str  # the completion
    tokens: int
    clipped: bool  # it ran into the token limit
    scores: tuple[float, ...]  # by each of the functions asked for

def end_tokens(model, tokenizer) -> set[int]:
    """All tokens that end a completion: the tokenizer's, the model's, and the chat template's."""
    ends = set()
    for holder in (tokenizer, model.generation_config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        ends |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<ANSWER>"}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except TemplateError:  # a template for other turns: then it has no say
            text = ""
        closing = tokenizer(text.partition("<ANSWER>")[2].lstrip(), add_special_tokens=False)
        ends |= set(closing["input_ids"][:1]) & set(tokenizer.all_special_ids)
    return {i for i in ends - {None} if 0 <= i < model.get_input_embeddings().num_embeddings}

def load_model(cfg: Config, stop: tuple[str, ...], device: torch.device) -> LM:
    """The model of --model, on `device`, in eval mode. Raises UserError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import cached_file, logging
    logging.disable_progress_bar()
    name = tiny_model() if cfg.model == "tiny" else cfg.model
    dtype = cfg.dtype if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, report = AutoModelForCausalLM.from_pretrained(name, dtype=dtype,
                                                             output_loading_info=True)
        folder = Path(cached_file(name, "config.json")).parent
    except (OSError, ValueError, ImportError) as e:
        raise UserError(f"--model {name} cannot be loaded: {' '.join(str(e).split())[:300]}") from e
    if lacks := sorted(report["missing_keys"]):
        raise UserError(f"--model {name} is no causal language model, or lacks weights: {lacks[0]}")
    for key, p in model.named_parameters():
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not p.isfinite().all():
            raise UserError(f"--model {name}: {key} is {p.dtype} or not finite: give a model whose "
                            "weights are finite and float32, bfloat16 or float16")
    if getattr(model.config, "quantization_config", None):
        raise UserError(f"--model {name} is quantised: give the model that it was made from")
    # Its parameters keep requires_grad: without it, bfloat16 on a CPU decodes at 0.6 of the speed.
    model.eval().to(device)
    params = {key: p for key, p in model.named_parameters() if re.search(cfg.trainable, key)}
    if not params:
        raise UserError(f"--trainable {cfg.trainable!r} finds no parameter: the first is called "
                        f"{next(model.named_parameters())[0]}")
    ends = sorted(end_tokens(model, tokenizer))
    # This replaces the model's own: none of its settings (sampling, penalties, forced tokens) must
    # reach the decoder. An end token fills finished rows, and is cut off with their end.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=cfg.max_new_tokens, eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0, stop_strings=list(stop) or None)
    return LM(model, tokenizer, params, folder)

def encode(lm: LM, rows: list[dict], chat: str, where: str) -> list[Example]:
    """Prompts as tokens, the shortest first. Raises UserError naming the row of list `where`.

    A rendered chat template holds its own special tokens, a raw prompt gets the tokenizer's.
    """
    new = lm.model.generation_config.max_new_tokens
    limit = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None) or 0
    limit = limit if limit > 0 else math.inf
    examples = []
    for i, row in enumerate(rows):
        prompt, raw = row["prompt"], isinstance(row["prompt"], str)
        render = chat == "on" or chat == "auto" and not raw and lm.tokenizer.chat_template
        if render:
            messages = [{"role": "user", "content": prompt}] if raw else prompt
            try:
                prompt = lm.tokenizer.apply_chat_template(messages, tokenize=False,
                                                          add_generation_prompt=True)
            except TemplateError as e:
                raise UserError(f"{where} row {i}: the chat template refuses it: {e}") from e
        elif not raw:
            prompt = "\n\n".join(message["content"] for message in prompt)
        ids = lm.tokenizer(prompt, add_special_tokens=not render)["input_ids"]
        if not 0 < len(ids) <= limit - new:
            raise UserError(f"{where} row {i}: its prompt has {len(ids)} tokens, and beside "
                            f"--max-new-tokens {new} the model takes 1 to {limit - new}: change "
                            "the prompt or the flag")
        examples.append(Example(i, row, ids))
    return sorted(examples, key=lambda example: len(example.ids))

@torch.inference_mode()
def generate(lm: LM, prompts: list[list[int]]) -> list[tuple[str, int, bool]]:
    """Greedy completions of token lists -> (text, tokens, whether clipped) of each.

    One batch, padded on the left. A completion is cut by position: before its first end token, or
    after its first stop string.
    """
    config, width = lm.model.generation_config, max(map(len, prompts))
    ids = [[config.pad_token_id] * (width - len(p)) + p for p in prompts]  # (rows, width)
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    ids, mask = (torch.tensor(x, device=lm.model.device) for x in (ids, mask))
    out = lm.model.generate(input_ids=ids, attention_mask=mask, generation_config=config,
                            tokenizer=lm.tokenizer)  # (rows, width + new)
    completions = []
    for new in out[:, width:].tolist():
        end = next((i for i, id in enumerate(new) if id in (config.eos_token_id or ())), None)
        text = lm.tokenizer.decode(new[:end])
        stops = [text.find(s) + len(s) for s in config.stop_strings or () if s in text]
        completions.append((text[:min(stops, default=None)], len(new[:end]),
                            end is None and not stops))
    return completions

def rollouts(lm: LM, theta, members: list[int], examples: list[Example], functions: list[Callable],
             cfg: Config, t: int, dist: Dist) -> tuple[list[Rollout], float]:
    """Every member's completion of every example, scored -> all, in order, on every rank; and the
    seconds in which this rank wrote weights. The parent, if it is a member, must be the first.

    A member with --rollout-batch examples is the unit of work, dealt to ranks in blocks: any number
    of ranks decodes the same batches, as in half precision a text can depend on the rows beside it.
    Expects params == round(theta) and leaves them so, also when a reward raises.
    """
    size, seconds = cfg.rollout_batch, 0.0
    work = [(n, examples[i:i + size]) for n in members for i in range(0, len(examples), size)]
    mine = work[len(work) * dist.rank // dist.world:len(work) * (dist.rank + 1) // dist.world]

    def play() -> list[Rollout]:
        nonlocal seconds
        done, current = [], cfg.population
        for n, group in tqdm(mine, f"iteration {t}", leave=False, disable=dist.rank > 0 or None):
            if n != current:
                start, current = clock(lm.model.device), n
                k, s = member(n, cfg.mirrored)
                perturb_(lm.params, theta, s * cfg.sigma, cfg.seed, t, k)
                seconds += clock(lm.model.device) - start
            completions = generate(lm, [example.ids for example in group])
            texts, rows = [text for text, *_ in completions], [example.row for example in group]
            who = f"member {n}" if n < cfg.population else "the parent"
            labels = [f"iteration {t}, {who}, row {example.index}" for example in group]
            scores = zip(*(call_reward(fn, rows, texts, labels) for fn in functions))
            done += [Rollout(n, example.index, *completion, each)
                     for example, completion, each in zip(group, completions, scores)]
        return done

    try:
        return [rollout for part in dist.gather(play) for rollout in part], seconds
    finally:
        load_(lm.params, theta)

def evaluate_population(lm: LM, theta, reward: Callable, examples: list[Example], cfg: Config,
                        t: int, dist: Dist) -> tuple[torch.Tensor, dict[str, float]]:
    """The parent and its N offspring on the same P prompts -> rewards R, (N + 1, P) float64, member
    x prompt, last row = the parent, and what they took; on every rank."""
    N, P = cfg.population, len(examples)
    # The parent comes first, while params still hold it.
    done, seconds = rollouts(lm, theta, [N, *range(N)], examples, [reward], cfg, t, dist)
    R = torch.tensor([r.scores[0] for r in done], dtype=torch.float64).view(N + 1, P).roll(-1, 0)
    return R, dict(tokens=sum(r.tokens for r in done), seconds_perturb=seconds,
                   clipped=sum(r.clipped for r in done) / len(done))

# ---- III. From rewards to a step. ----------------------------------------------------------------
def fitness(R: torch.Tensor) -> torch.Tensor:
    """Mean over prompts, (members, P) -> (members,) float64. Sums are exact (fsum): the same
    rewards in another order must tie, not differ by rounding."""
    return torch.tensor([math.fsum(row) / len(row) for row in R.tolist()], dtype=torch.float64)

def shape_fitness(F, mode: str = "zscore") -> torch.Tensor:
    """Fitness (N,) -> step weights w (N,) float64 that sum to 0; zeros if all of F are tied.

    zscore: (F - mean) / std over the population            (arXiv 2509.24372, Algorithm 2, step 6)
    ranks:  ranks from -1/2 to 1/2, tied members share one            (arXiv 1703.03864, section 2)
    none:   F - mean, as what is added to all rewards says nothing about any

    [2, 2, 5] has the ranks [-1/4, -1/4, 1/2]. Raises ValueError for a fitness that is not finite.
    """
    F = torch.as_tensor(F, dtype=torch.float64)
    if not F.isfinite().all():
        raise ValueError(f"fitness is not finite: {F.tolist()}")
    if F.max() - F.min() <= 1e-12 * F.abs().max():
        return torch.zeros_like(F)
    if mode == "ranks":
        return torch.sign(F[:, None] - F).sum(1) / (2 * (len(F) - 1))  # (N, N) -> (N,)
    centred = F - F.mean()
    return centred / centred.square().mean().sqrt() if mode == "zscore" else centred

def owners(theta: dict[str, torch.Tensor], world: int) -> dict[str, int]:
    """Which rank updates which tensor: the largest first, to the rank with the least so far."""
    load, owner = [0] * world, {}
    for name in sorted(theta, key=lambda name: (-theta[name].numel(), name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += theta[name].numel()
    return owner

def update_(theta, w, alpha: float, seed: int, t: int, mirrored: bool = False, device=None,
            dist: Dist = Dist()) -> float:
    """theta += (alpha / N) * sum_n w_n s_n z_n -> the length of that step.

    theta: float32 tensors by name. w: (N,) step weights. device: of params, if not theta's. One
    rank, its owner, sums a tensor whole, in member order and float32, and broadcasts it: the bits
    do not depend on the number of ranks. A mirrored pair is one draw, a zero weight none.
    Raises ValueError, with nothing written, for weights that are not finite.
    """
    device = device or next(iter(theta.values())).device
    if not w.isfinite().all():
        raise ValueError(f"step weights are not finite: {w.tolist()}")
    coefficient: dict[int, float] = {}  # of z_k, by k
    for n, w_n in enumerate(w.tolist()):
        k, s = member(n, mirrored)
        coefficient[k] = coefficient.get(k, 0.0) + alpha / len(w) * s * w_n
    owner = owners(theta, dist.world)

    @torch.no_grad()
    def step(name):
        total = torch.zeros(theta[name].shape, device=device)
        for k, c in coefficient.items():
            if c != 0:
                total.add_(noise(total.shape, seed, t, k, name, device=device), alpha=c)
        theta[name].add_(total.to(theta[name].device))
        return name, torch.linalg.vector_norm(total).item()

    mine = {name: p for name, p in theta.items() if owner[name] == dist.rank}
    lengths = {name: length for part in dist.gather(lambda: for_each(step, mine, device))
               for name, length in part}
    if dist.world > 1:
        for work in [torch.distributed.broadcast(theta[name], rank, async_op=True)
                     for name, rank in owner.items()]:
            work.wait()
    return math.hypot(*(lengths[name] for name in theta))

# ---- IV. Measurement: nothing here changes theta. ------------------------------------------------
def due(t: int, every: int, last: int) -> bool:
    """Whether what happens at 0, each `every` iterations and at the last is due; every 0: never."""
    return every > 0 and (t % every == 0 or t == last)

class Log:
    """The console and the files of --out, on rank 0; the calls of other ranks do nothing."""

    def __init__(self, out: str, dist: Dist):
        self.out, self.silent, self.warned = Path(out), dist.rank > 0, set()
        if not self.silent:
            self.out.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        if not self.silent:
            print(text, flush=True)

    def write(self, file: str, **values) -> None:
        """Appends one JSON object as a line."""
        if not self.silent:
            with open(self.out / file, "a", encoding="utf-8") as f:
                f.write(json.dumps(values, ensure_ascii=False) + "\n")

    def warn(self, t: int, text: str) -> None:
        """Says and writes each text once."""
        if text not in self.warned:
            self.warned.add(text)
            self.say(f"warning: {text}")
            self.write("metrics.jsonl", kind="warning", iteration=t, text=text)

def warn_about(log: Log, t: int, F, parent: float, clipped: float) -> None:
    """The states in which a run goes on and learns nothing."""
    fall = parent - F.mean().item()
    if F.max() == F.min():
        log.warn(t, "all offspring are tied, so there is no step: --sigma is too small, or the "
                    "reward tells nothing apart")
    if fall > abs(parent) / 2 and fall >= 10 * F.std(correction=0):
        log.warn(t, "all offspring fell far below a parent that is fine: --sigma is too large")
    if clipped > 0.5:
        log.warn(t, "more than half of the completions ran into --max-new-tokens")

# ---- V. Persistence ------------------------------------------------------------------------------
def save_model(lm: LM, folder: Path) -> None:
    """Writes a Hugging Face folder that whatever loads the base model loads, or nothing: only the
    weights are new, as not all that one major version of transformers writes is read by another.
    """
    draft = folder.with_suffix(".draft")
    lm.model.save_pretrained(draft)
    (draft / "generation_config.json").unlink(missing_ok=True)  # ours, not the model's
    for file in lm.folder.iterdir():
        if re.match(r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|"
                    r"generation_config)|.*\.(model|tiktoken)$", file.name):
            (shutil.copytree if file.is_dir() else shutil.copyfile)(file, draft / file.name)
    config = json.loads((lm.folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") == lm.model.config.model_type:  # else it was loaded as another
        dtype = str(lm.model.dtype).removeprefix("torch.")
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    os.replace(draft, folder)

# ---- The program ---------------------------------------------------------------------------------
def prepare(given: dict[str, Any]) -> tuple[Config, Task, LM, list[Example], list[Example]]:
    """Flags, over the task's own settings, over the defaults -> complete settings, task, model,
    training and held-out prompts. Raises UserError."""
    cfg = Config(**given)
    name = cfg.task or ("toy" if cfg.model == "tiny" else "countdown")
    out = Path(cfg.out or f"runs/{Path(name).stem}-{Path(cfg.model).name}-"
                          f"{time.strftime('%Y%m%d-%H%M%S')}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is there and not empty: give a new folder")
    task = load_task(name, cfg.data, cfg.seed)
    if unknown := task.defaults.keys() - Config.__dataclass_fields__.keys():
        raise UserError(f"--task {name}: its defaults hold {min(unknown)!r}, which is no setting")
    cfg = Config(**task.defaults | given)
    cfg = dataclasses.replace(cfg, task=name, out=str(out), alpha=cfg.alpha or cfg.sigma / 2,
                              max_new_tokens=cfg.max_new_tokens or task.max_new_tokens)
    heldout = task.heldout[:cfg.eval_size or None]
    lm = load_model(cfg, task.stop, pick_device(cfg.device))
    if cfg.chat == "on" and not lm.tokenizer.chat_template:
        raise UserError("--chat on: this model has no chat template: use --chat off")
    return (cfg, task, lm, encode(lm, task.train, cfg.chat, "training"),
            encode(lm, heldout, cfg.chat, "held-out"))

def provenance(lm: LM, cfg: Config, dist: Dist) -> dict[str, Any]:
    """What a result depends on beside model and data."""
    import transformers
    device, here = lm.model.device, Path(__file__).parent
    return dict(
        command=sys.argv, config=dataclasses.asdict(cfg), world=dist.world,
        device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        dtype=str(lm.model.dtype), threads=torch.get_num_threads(), python=sys.version,
        torch=torch.__version__, transformers=transformers.__version__,
        sha256={file: hashlib.sha256((here / file).read_bytes()).hexdigest()
                for file in ("es_llm.py", "tasks.py")})

def evaluate(lm: LM, theta, task: Task, examples: list[Example], cfg: Config, t: int, log: Log,
             dist: Dist) -> list[str]:
    """Reward and accuracy of theta on held-out rows, written and printed -> its answers by row."""
    functions = list(dict.fromkeys([task.reward, task.accuracy]))  # one, if they are the same
    done, _ = rollouts(lm, theta, [cfg.population], examples, functions, cfg, t, dist)
    done.sort(key=lambda rollout: rollout.index)
    numbers = {}
    for i, name, error in ((0, "reward", "reward_stderr"), (-1, "accuracy", "stderr")):
        values = [rollout.scores[i] for rollout in done]
        numbers[name] = statistics.fmean(values)
        numbers[error] = statistics.stdev(values) / len(values) ** .5 if len(values) > 1 else 0.0
    log.write("metrics.jsonl", kind="eval", iteration=t, n=len(done), **numbers)
    log.say("held-out after {}: accuracy {accuracy:.3f} +- {stderr:.3f}, reward "
            "{reward:.3f} +- {reward_stderr:.3f} (n = {})".format(t, len(done), **numbers))
    for rollout in done[:5]:
        log.write("samples.jsonl", iteration=t, row=rollout.index, text=rollout.text,
                  reward=rollout.scores[0], accuracy=rollout.scores[-1],
                  prompt=task.heldout[rollout.index]["prompt"])
    return [rollout.text for rollout in done]

def run(given: dict[str, Any], dist: Dist) -> None:
    """One whole run, on every rank."""
    cfg, task, lm, train, heldout = dist.rank0_first(lambda: prepare(given))
    # Rank 0's: --out may hold the time of day, and a user's task need not give all the same rows.
    cfg, train, heldout = dist.gather(lambda: (cfg, train, heldout))[0]
    device = lm.model.device
    home = torch.device("cpu") if cfg.theta_device == "cpu" else device
    theta = {name: p.detach().to(home, torch.float32, copy=True) for name, p in lm.params.items()}
    if home != device and device.type == "cuda":
        for name in theta:
            theta[name] = theta[name].pin_memory()
    size = sum(p.numel() for p in theta.values())
    log = Log(cfg.out, dist)
    log.write("config.json", **dataclasses.asdict(cfg))
    log.write("metrics.jsonl", kind="run", **provenance(lm, cfg, dist))
    log.say(f"{cfg.model}: {size:,} weights, {lm.model.dtype}, on {dist.world} x {device.type} | "
            f"{task.name}: {len(train)} training and {len(heldout)} held-out rows | N "
            f"{cfg.population}, sigma {cfg.sigma:g}, alpha {cfg.alpha:g} | {cfg.out}")
    first, last, kilobyte = [], [], 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    if heldout and due(0, cfg.eval_every, cfg.iterations):
        first = evaluate(lm, theta, task, heldout, cfg, 0, log, dist)

    start = clock(device)
    for t in range(1, cfg.iterations + 1):
        begin = clock(device)
        batch = train
        if 0 < cfg.batch < len(train):  # chosen by (seed, t), and still the shortest first
            picked = random.Random(mix(cfg.seed, t)).sample(range(len(train)), cfg.batch)
            batch = [train[i] for i in sorted(picked)]

        # ---- TRAINING BEGIN: these lines are the algorithm, all after them measure
        R, took = evaluate_population(lm, theta, task.reward, batch, cfg, t, dist)  # (N + 1, P)
        F = fitness(R)  # (N + 1,): the offspring's, then the parent's
        w = shape_fitness(F[:-1], cfg.shaping)  # (N,)
        scored = clock(device)
        step = update_(theta, w, cfg.alpha, cfg.seed, t, cfg.mirrored, device, dist)
        moved = load_(lm.params, theta)  # how many weights of the model differ from before
        # ---- TRAINING END
        if not math.isfinite(step):
            raise FloatingPointError(f"iteration {t}: the step is not finite: lower --alpha")
        now = clock(device)
        F, parent = F[:-1], F[-1].item()
        row = dict(
            reward_mean=F.mean().item(), reward_std=F.std(correction=0).item(),
            reward_min=F.min().item(), reward_max=F.max().item(), parent_reward=parent,
            frac_better=(F > parent).double().mean().item(), unique=len(F.unique()),
            update_norm=step, frac_moved=moved / size, **took, seconds=now - begin,
            seconds_rollout=scored - begin - took["seconds_perturb"], seconds_update=now - scored,
            tokens_per_second=took["tokens"] / (now - begin),
            eta_seconds=(now - start) / t * (cfg.iterations - t),
            peak_memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte)
        log.write("metrics.jsonl", kind="train", iteration=t, **row)
        log.say("{:4d}/{} | parent {parent_reward:8.4f} | offspring {reward_mean:8.4f} +- "
                "{reward_std:.4f} | better {frac_better:4.0%} | step {update_norm:.3g} | "
                "{tokens_per_second:5.0f} tok/s | {seconds:6.2f} s | ETA {}".format(
                    t, cfg.iterations, timedelta(seconds=round(row["eta_seconds"])), **row))
        warn_about(log, t, F, parent, took["clipped"])
        if heldout and due(t, cfg.eval_every, cfg.iterations):
            last = evaluate(lm, theta, task, heldout, cfg, t, log, dist)

    dist.gather(lambda: save_model(lm, log.out / "model") if dist.rank == 0 else None)
    for row, before, after in list(zip(task.heldout, first, last))[:3]:
        log.say(f"\n{row['prompt']!r}\n  before: {before!r}\n  after:  {after!r}")
    log.write("metrics.jsonl", kind="end", iteration=cfg.iterations, seconds=clock(device) - start)
    log.say(f"{log.out / 'model'} holds the model after {cfg.iterations} iterations")

def main(argv: list[str] | None = None) -> int:
    """The program -> its exit code: 0, or 2 (of several ranks 1) after a word on bad input."""
    try:
        given = parse(sys.argv[1:] if argv is None else argv)
        run(given, Dist.start(Config(**given).timeout_minutes))
        return 0
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

if __name__ == "__main__":
    sys.exit(main())
