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
5. the parent is scored too, as a measurement; prompts are never scored, only completions.

    python es_llm.py                                                     # no GPU, no download
    python es_llm.py --model Qwen/Qwen2.5-0.5B-Instruct                  # one GPU, Countdown
    torchrun --standalone --nproc_per_node=8 es_llm.py --model Qwen/Qwen2.5-3B-Instruct

--out receives config.json, metrics.jsonl, samples.jsonl, checkpoint/, model/ (a Hugging Face
folder) and seeds.jsonl: with the base model, the weights of any iteration. Guaranteed: exact
restore; noise without collisions or global state; the same bits for any number of ranks (float32,
one kind of device, as many threads a rank) and after a kill; no step if all rewards tie; measuring
never changes a run. Not guaranteed: bits on another device; in half precision, text with another
--rollout-batch. Not here: sampling, adapters, quantised weights, models larger than one device.
"""
import argparse, contextlib, dataclasses, functools, hashlib, inspect, json, math, os
import random, re, resource, shutil, signal, statistics, sys, time, traceback, zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator, Literal, get_args

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from tasks import (Task, UserError, append, call_reward, dump, explain, load_task, read_log,
                   replace, require, tiny_model)

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
    resume: bool = False  # go on with the run in --out, or start it if there is none
    replay: str = ""  # a seeds.jsonl: rebuild the model it leads to after --iterations; no rollouts
    save_every: int = 50  # iterations between checkpoints, of 4 bytes a weight; 0: never
    check_every: int = 1  # iterations between comparisons of all ranks' theta; 0: never
    # -- measurement
    eval_every: int = 10  # iterations between evaluations on held-out rows; 0: never
    eval_size: int = 0  # held-out rows to evaluate on; 0: all

    def __post_init__(self):
        least = dict(population=2, sigma=1e-30, rollout_batch=1, timeout_minutes=1e-3)
        for name, value in vars(self).items():
            choices, low = get_args(self.__annotations__[name]), least.get(name, 0)
            require(value in choices if choices else isinstance(value, str) or low <= value < 1e38,
                    f"--{name} is {value!r}: give {choices or f'a number from {low}'}")
        with explain(f"--trainable {self.trainable!r}", re.error): re.compile(self.trainable)
        require(self.population % 2 == 0 or not self.mirrored, "--mirrored: --population is odd")
        require(not self.resume or self.out and not self.replay, "--resume needs just --out")

def parse(argv: list[str]) -> dict[str, Any]:
    """The flags that were given, by field name. Raises UserError; --help prints and exits."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__.partition("\n")[0],
        epilog="Defaults are in [ ]; those of a built-in task come first.")
    parser.error = lambda message: require(False, f"{message} (see --help)")
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

# ---- Ranks: the processes of a run, and how they end together. -----------------------------------
STOP: list[tuple[int, float]] = []  # signals that this process was sent, and when

def on_signal(number: int, frame) -> None:
    """The first asks for an end that loses nothing; one a second later (no echo) ends at once."""
    if STOP and time.monotonic() - STOP[0][1] > 1: os._exit(128 + number)
    STOP.append((number, time.monotonic()))

def stop_if_asked() -> None:
    if STOP: raise SystemExit(128 + STOP[0][0])

class Dist(namedtuple("Dist", "rank world", defaults=(0, 1))):
    """torchrun's processes. Without it there is one, and nothing communicates."""

    @staticmethod
    def start(timeout_minutes: float) -> "Dist":
        """Joins torchrun's group: gloo for tensors and objects in host memory, nccl for CUDA."""
        if "RANK" not in os.environ: return Dist()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, rank, world = next(torch.distributed.rendezvous("env://"))
        # On one host torchrun keeps a store for all restarts, with addresses of the dead in it.
        nth = os.environ.get("GROUP_WORLD_SIZE") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"]
        torch.distributed.init_process_group(
            backend, store=torch.distributed.PrefixStore(f"start {nth}", store), rank=rank,
            world_size=world, timeout=timedelta(minutes=timeout_minutes))
        return Dist(rank, world)

    def gather(self, fn: Callable[[], Any]) -> list:
        """Runs fn() on every rank -> all results, by rank, the same list everywhere. What it raises
        on one is raised on all: else they would wait until the timeout for a rank that is gone."""
        if self.world == 1: return [fn()]
        try:
            mine = fn(), None
        except BaseException as e:
            ours = isinstance(e, (SystemExit, UserError))
            mine = None, e if ours else UserError(traceback.format_exc())
        everyone = [None] * self.world
        torch.distributed.all_gather_object(everyone, mine)
        for rank, (_, error) in enumerate(everyone):
            if isinstance(error, UserError): raise UserError(f"rank {rank}: {error}")
            if error: raise error
        return [result for result, _ in everyone]

    def rank0(self, fn: Callable[[], Any]) -> Any:
        """fn() on rank 0 alone -> its result on every rank. UserError if a disk refuses."""
        disk = explain("--out cannot be read or written; what was complete there still is: mend "
                       "this and give the same command with --resume", OSError, SafetensorError)
        return self.gather(disk(lambda: fn() if self.rank == 0 else None))[0]

    def rank0_first(self, fn: Callable[[], Any]) -> Any:
        """fn(), on rank 0 before the others, who then find its download or cache complete."""
        mine = []
        for turn in (self.rank == 0, self.rank != 0):
            self.gather(lambda: mine.append(fn()) if turn else None)
        return mine[0]

    def broadcast(self, tensors: dict[str, torch.Tensor], owner: dict[str, int]) -> None:
        """Each tensor becomes, in place, that of the rank which owns it."""
        for name, rank in owner.items() if self.world > 1 else ():
            torch.distributed.broadcast(tensors[name], rank)

def pick_device(name: str) -> torch.device:
    """The device of this process; a GPU is the one numbered LOCAL_RANK. Raises UserError."""
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    mps = torch.backends.mps.is_available() and "RANK" not in os.environ  # it has no collectives
    if name == "auto": name = "cuda" if count else "mps" if mps else "cpu"
    require(name == "cpu" or (local < count if name == "cuda" else mps), f"--device {name}: none "
            f"for process {local} of this host, which has {count} GPUs: start fewer, or use cpu")
    if name == "cuda": torch.cuda.set_device(local)
    return torch.device(f"cuda:{local}" if name == "cuda" else name)

def clock(device: torch.device) -> float:
    """Seconds, read once the device has done all that was asked of it."""
    if device.type != "cpu": getattr(torch, device.type).synchronize()
    return time.perf_counter()

# ---- I. Noise and weights: each z is a pure function of its key; weights are only ever written. --
def mix(*key: int | str) -> int:
    """Integers and names -> 63 bits that depend on each, on their order and their number."""
    text = repr(key).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

def noise(shape, *key: int | str, device="cpu") -> torch.Tensor:
    """N(0, I) float32 of `shape`, on `device`: the same whenever the key is, on one kind of device.

    The whole tensor, as what `randn` draws depends on size and dtype. A CPU's generator reads 32
    bits of a seed, too few for a run. mt19937 is linear: the XOR of two states gives the XOR of two
    streams. So each half of the key seeds one; one moves by a word, else equal halves would cancel.
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
    """[fn(name) of each tensor], the largest first; on a CPU by as many threads as torch has, as
    `randn` uses one, without the GIL. Each has one torch thread: results ignore their number."""
    names = sorted(tensors, key=lambda name: -tensors[name].numel())
    if torch.device(device).type != "cpu": return [fn(name) for name in names]
    return list(thread_pool(torch.get_num_threads()).map(fn, names))

def perturb_(params, theta, scale: float, *key: int) -> None:
    """Writes params = round(theta + scale * z): tensors by name, theta float32; scale: s * sigma;
    key: (seed, iteration, noise index). Extra memory: one float32 tensor (two if theta is
    elsewhere); on a CPU one a thread."""
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
        changed = int(torch.count_nonzero(rounded != p))  # .sum() would make an int64 copy
        p.copy_(rounded)
        return changed
    return sum(for_each(write, params, next(iter(params.values())).device))

def digest(tensors) -> str:
    """16 hex digits that follow from the values of all tensors: a checksum of each as float32."""
    words = lambda name: tensors[name].detach().float().contiguous().cpu().numpy()
    return f"{mix(*for_each(lambda name: zlib.crc32(words(name)), tensors, 'cpu')):016x}"

# ---- II. Rollouts and rewards: greedy completions of the same prompts by every member. -----------
LM = namedtuple("LM", "model tokenizer params folder")  # params: trainable, by name, tied ones once
Example = namedtuple("Example", "index row ids")  # index of the row in its list; tokens of a prompt
Completion = namedtuple("Completion", "text tokens clipped")  # clipped: at the token limit

def end_tokens(model, tokenizer) -> set[int]:
    """All tokens that end a completion: the tokenizer's, the model's, and the chat template's."""
    ends = set()
    for holder in (tokenizer, model.generation_config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        ends |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<ANSWER>"}]
        with contextlib.suppress(TemplateError):  # a template for other turns has no say
            text = tokenizer.apply_chat_template(turns, tokenize=False).partition("<ANSWER>")[2]
            closing = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1]
            ends |= set(closing) & set(tokenizer.all_special_ids)
    return {i for i in ends - {None} if 0 <= i < model.get_input_embeddings().num_embeddings}

def load_model(cfg: Config, stop: tuple[str, ...], device: torch.device) -> LM:
    """The model of --model, on `device`, in eval mode. Raises UserError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import cached_file, logging
    logging.disable_progress_bar()
    name = tiny_model() if cfg.model == "tiny" else cfg.model
    with explain(f"--model {name} cannot be loaded", OSError, ValueError, ImportError):
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, report = AutoModelForCausalLM.from_pretrained(name, dtype=cfg.dtype,
                                                             output_loading_info=True)
        folder = Path(cached_file(name, "config.json")).parent
    lacks = sorted(report["missing_keys"])[:1]
    require(not lacks, f"--model {name} is no causal language model, or lacks weights: {lacks}")
    for key, p in model.named_parameters():
        require(p.dtype in (torch.float32, torch.bfloat16, torch.float16) and p.isfinite().all(),
                f"--model {name}: {key} is quantised ({p.dtype}) or not finite: give another")
    # Its parameters keep requires_grad: without it, bfloat16 on a CPU decodes at 0.6 of the speed.
    model.eval().to(device)
    params = {key: p for key, p in model.named_parameters() if re.search(cfg.trainable, key)}
    require(params, f"--trainable {cfg.trainable!r} finds no parameter: the first is called "
            f"{next(model.named_parameters())[0]}")
    ends = sorted(end_tokens(model, tokenizer))
    # This replaces the model's own: none of its settings (sampling, penalties, forced tokens) must
    # reach the decoder. An end token fills finished rows, and is cut off with their end.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=cfg.max_new_tokens, eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0, stop_strings=list(stop) or None)
    return LM(model, tokenizer, params, folder)

def encode(lm: LM, rows: list[dict], chat: str, where: str) -> list[Example]:
    """Prompts as tokens, the shortest first. A rendered chat template has its own special tokens,
    a raw prompt gets the tokenizer's. Raises UserError naming the row of list `where`."""
    limit = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None) or 0
    room = (limit if limit > 0 else math.inf) - lm.model.generation_config.max_new_tokens
    examples = []
    for i, row in enumerate(rows):
        prompt, raw = row["prompt"], isinstance(row["prompt"], str)
        render = chat == "on" or chat == "auto" and not raw and lm.tokenizer.chat_template
        if render:
            messages = [{"role": "user", "content": prompt}] if raw else prompt
            with explain(f"{where} row {i}: --chat {chat}: its chat template fails, or there is "
                         "none", TemplateError, ValueError):
                prompt = lm.tokenizer.apply_chat_template(messages, tokenize=False,
                                                          add_generation_prompt=True)
        elif not raw: prompt = "\n\n".join(message["content"] for message in prompt)
        ids = lm.tokenizer(prompt, add_special_tokens=not render)["input_ids"]
        require(0 < len(ids) <= room, f"{where} row {i}: its prompt has {len(ids)} tokens, and "
                f"beside --max-new-tokens the model takes 1 to {room}")
        examples.append(Example(i, row, ids))
    return sorted(examples, key=lambda example: len(example.ids))

def guard(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Sees each token's logits: from NaN, decoding would go on with token 0. Hears of signals."""
    stop_if_asked()
    require(logits.max().isfinite(), "logits are not finite: lower --sigma or --alpha")
    return logits

@torch.inference_mode()
def generate(lm: LM, prompts: list[list[int]]) -> list[Completion]:
    """Greedy completions of token lists, one batch padded on the left; each cut by position, before
    its first end token or after its first stop string."""
    config, width = lm.model.generation_config, max(map(len, prompts))
    ids = [[config.pad_token_id] * (width - len(p)) + p for p in prompts]  # (rows, width)
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    ids, mask = (torch.tensor(x, device=lm.model.device) for x in (ids, mask))
    out = lm.model.generate(input_ids=ids, attention_mask=mask, generation_config=config,
                            tokenizer=lm.tokenizer, logits_processor=[guard])
    completions = []
    for new in out[:, width:].tolist():
        end = next((i for i, id in enumerate(new) if id in (config.eos_token_id or ())), None)
        text = lm.tokenizer.decode(new[:end])
        stops = [text.find(s) + len(s) for s in config.stop_strings or () if s in text]
        completions.append(Completion(text[:min(stops, default=None)], len(new[:end]),
                                      end is None and not stops))
    return completions

def evaluate_population(lm: LM, theta, members, examples, functions, cfg: Config, t: int, dist: Dist
                        ) -> tuple[torch.Tensor, list[Completion], float]:
    """Every member's completion of every example, scored -> on every rank, rewards R (members, P,
    functions) float64 and completions; and the seconds in which this rank wrote weights.

    Member N is the parent. A member with --rollout-batch examples is the unit of work, dealt to
    ranks in blocks: any number of ranks decodes the same batches, on which half-precision text can
    depend. params are round(theta) before and after, also when a reward raises."""
    size, seconds = cfg.rollout_batch, 0.0
    work = [(n, examples[i:i + size]) for n in members for i in range(0, len(examples), size)]
    mine = work[len(work) * dist.rank // dist.world:len(work) * (dist.rank + 1) // dist.world]

    def play() -> list[tuple[Completion, tuple[float, ...]]]:
        nonlocal seconds
        done, current = [], cfg.population  # params are the parent's
        for n, group in tqdm(mine, f"iteration {t}", leave=False, disable=dist.rank > 0 or None):
            if n != current:
                start, current, (k, s) = clock(lm.model.device), n, member(n, cfg.mirrored)
                if n == cfg.population: load_(lm.params, theta)
                else: perturb_(lm.params, theta, s * cfg.sigma, cfg.seed, t, k)
                seconds += clock(lm.model.device) - start
            completions = generate(lm, [example.ids for example in group])
            who = f"member {n}" if n < cfg.population else "the parent"
            labels = [f"iteration {t}, {who}, row {example.index}" for example in group]
            scores = [call_reward(fn, [example.row for example in group],
                                  [completion.text for completion in completions], labels)
                      for fn in functions]
            done += zip(completions, zip(*scores))
        return done
    try:
        done = [pair for part in dist.gather(play) for pair in part]
    finally:
        load_(lm.params, theta)
    R = torch.tensor([scores for _, scores in done], dtype=torch.float64)
    return R.view(len(members), len(examples), -1), [text for text, _ in done], seconds

# ---- III. From rewards to a step. ----------------------------------------------------------------
def fitness(R: torch.Tensor) -> list[float]:
    """Mean over prompts, (members, P) -> (members,). Sums are exact (fsum): the same rewards in
    another order must tie, not differ by rounding."""
    return [math.fsum(row) / len(row) for row in R.tolist()]

def shape_fitness(F, mode: str = "zscore") -> torch.Tensor:
    """Fitness (N,) -> step weights w (N,) float64 that sum to 0; zeros if all of F are tied.

    zscore: (F - mean) / std over the population            (arXiv 2509.24372, Algorithm 2, step 6)
    ranks:  ranks from -1/2 to 1/2, tied members share one            (arXiv 1703.03864, section 2)
    none:   F - mean, as what is added to all rewards says nothing about any
    [2, 2, 5] has the ranks [-1/4, -1/4, 1/2]. Raises ValueError for a fitness that is not finite.
    """
    F = torch.as_tensor(F, dtype=torch.float64)
    require(F.isfinite().all(), f"fitness is not finite: {F.tolist()}")
    if F.max() - F.min() <= 1e-12 * F.abs().max(): return torch.zeros_like(F)
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
    do not depend on the number of ranks. A mirrored pair is one draw, a zero weight none. Raises
    ValueError, with nothing written, for weights that are not finite."""
    device = device or next(iter(theta.values())).device
    require(w.isfinite().all(), f"step weights are not finite: {w.tolist()}")
    coefficient: dict[int, float] = {}  # of z_k, by k
    for n, w_n in enumerate(w.tolist()):
        k, s = member(n, mirrored)
        coefficient[k] = coefficient.get(k, 0.0) + alpha / len(w) * s * w_n
    owner = owners(theta, dist.world)

    @torch.no_grad()
    def step(name):
        total = torch.zeros(theta[name].shape, device=device)
        for k, c in coefficient.items():
            if c != 0: total.add_(noise(total.shape, seed, t, k, name, device=device), alpha=c)
        length = torch.linalg.vector_norm(total).item()
        require(math.isfinite(length), f"{name}: its step is not finite: lower --alpha")
        theta[name].add_(total.to(theta[name].device))
        return name, length
    mine = {name: p for name, p in theta.items() if owner[name] == dist.rank}
    lengths = dict(sum(dist.gather(lambda: for_each(step, mine, device)), []))
    dist.broadcast(theta, owner)
    return math.hypot(*(lengths[name] for name in theta))

# ---- IV. Measurement: nothing here changes theta. ------------------------------------------------
def due(t: int, every: int, last: int) -> bool:
    """Whether what happens at 0, each `every` iterations and at the last is due; every 0: never."""
    return every > 0 and (t % every == 0 or t == last)

def warnings(F: list[float], parent: float, clipped: float) -> Iterator[str]:
    """The states in which a run goes on and learns nothing."""
    fall = parent - statistics.fmean(F)
    if max(F) == min(F):
        yield "all offspring are tied: --sigma is too small, or the reward tells nothing apart"
    if fall > abs(parent) / 2 and fall >= 10 * statistics.pstdev(F):
        yield "all offspring fell far below a parent that is fine: --sigma is too large"
    if clipped > 0.5: yield "more than half of the completions ran into --max-new-tokens"

def evaluate(lm: LM, theta, task: Task, examples, cfg: Config, t: int, dist: Dist) -> tuple:
    """Reward and accuracy of theta on held-out rows -> a line for the log, and five samples."""
    fns = list(dict.fromkeys([task.reward, task.accuracy]))  # one, if they are the same
    R, texts, _ = evaluate_population(lm, theta, [cfg.population], examples, fns, cfg, t, dist)
    line = dict(kind="eval", iteration=t, n=len(examples))
    for i, name, error in ((-1, "accuracy", "stderr"), (0, "reward", "reward_stderr")):
        values = R[0, :, i].tolist()
        line[name] = statistics.fmean(values)
        line[error] = statistics.stdev(values) / len(values) ** .5 if len(values) > 1 else 0.0
    return line, [dict(iteration=t, row=example.index, prompt=example.row["prompt"],
                       text=completion.text, reward=r[0].item(), accuracy=r[-1].item())
                  for example, completion, r in list(zip(examples, texts, R[0]))[:5]]

# ---- V. Persistence: a log grows by whole lines; all else is written aside, then renamed. --------
def save_model(lm: LM, folder: Path) -> None:
    """Writes a Hugging Face folder that whatever loads the base model loads: only the weights are
    new, as not all that one major version of transformers writes is read by another."""
    lm.model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # ours, not the model's
    for file in lm.folder.iterdir():
        if re.match(r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|"
                    r"generation_config)|.*\.(model|tiktoken)$", file.name):
            (shutil.copytree if file.is_dir() else shutil.copyfile)(file, folder / file.name)
    config = json.loads((lm.folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") == lm.model.config.model_type:  # else it was loaded as another
        dtype = str(lm.model.dtype).removeprefix("torch.")
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

def save_checkpoint(file: Path, theta, t: int) -> None:
    """theta after t iterations takes the place of the last checkpoint."""
    file.parent.mkdir(exist_ok=True)
    state = dict(iteration=str(t), digest=digest(theta))
    replace(file, lambda draft: save_file(theta, draft, metadata=state))

def load_checkpoint(file: Path, theta) -> int:
    """Writes the checkpoint to theta -> its iteration; 0 if there is none. Raises UserError."""
    if not file.exists(): return 0
    damaged = f"{file} is damaged: delete it, and seeds.jsonl will stand in for it"
    with explain(damaged, SafetensorError), safe_open(file, "pt") as checkpoint:
        for name in theta:
            theta[name].copy_(checkpoint.get_tensor(name))
        state = checkpoint.metadata()
    require(digest(theta) == state["digest"], damaged)
    return int(state["iteration"])

def agree(theta, t: int, cfg: Config, logged: dict[int, dict], dist: Dist) -> str | None:
    """Digest of theta after t iterations, if it is due. Raises UserError where a rank or the seed
    log has another, and SystemExit on all ranks if any was sent a signal."""
    def look() -> str | None:
        stop_if_asked()
        return digest(theta) if due(t, cfg.check_every, cfg.iterations) else None
    states = dist.gather(look)
    odd = [f"rank {rank}" for rank, state in enumerate(states) if state != states[0]]
    if logged.get(t + 1, {}).get("theta") not in (None, states[0]):  # with which t + 1 begins
        odd.append("the seed log")
    require(not odd, f"after iteration {t}, {', '.join(odd)} has other weights than rank 0")
    return states[0]

def read_seeds(file: Path) -> tuple[dict, dict[int, dict], int]:
    """A seed log -> its first line; the others by iteration, of which the last, once a run ended,
    has no fitness, but theta's last digest; and how many have. Raises UserError."""
    first, *lines = read_log(file) or [{}]
    logged = {line.get("iteration"): line for line in sorted(lines, key=lambda line: "F" in line)}
    steps = sorted(t for t in logged if "F" in logged[t])
    require(steps == list(range(1, len(steps) + 1)), f"{file} lacks an iteration of {steps}")
    return first, logged, len(steps)

def open_run(lm: LM, theta, cfg: Config, origin: dict) -> tuple[int, dict[int, dict], set]:
    """Opens --out. theta becomes the last checkpoint's, if there is one -> iterations in theta; the
    seed log by iteration; what metrics.jsonl has. Raises UserError for another run, or no room."""
    out = Path(cfg.out)
    first, logged, steps = read_seeds(Path(cfg.replay or out / "seeds.jsonl"))
    differ = [f"{key} was {first.get(key)} and is {value}" for key, value in origin.items()
              if first and key != "threads" and value not in (None, first.get(key))]
    require(not differ, f"{cfg.replay or out} is another run: {'; '.join(differ)}")
    require(cfg.replay or steps <= cfg.iterations, f"--iterations: {out} has already done {steps}")
    if not cfg.replay: logged.pop(steps + 1, None)
    done = load_checkpoint(out / "checkpoint/theta.safetensors", theta)
    require(done <= steps, f"{out}/checkpoint is ahead of its seeds.jsonl: delete it")
    out.mkdir(parents=True, exist_ok=True)
    replace(out / "seeds.trial", lambda folder: save_model(lm, folder))  # what fails, fails now
    size = lambda folder: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    need = size(out / "seeds.trial") + 8 * sum(p.numel() for p in theta.values())
    room = shutil.disk_usage(out).free + size(out)
    shutil.rmtree(out / "seeds.trial")
    require(need < room, f"--out {out}: the model and two checkpoints need {need >> 20} MB")
    metrics = read_log(out / "metrics.jsonl")
    have = {(line["kind"], line.get("text", line["iteration"])) for line in metrics}
    seeds = [first or origin, *(logged[t + 1] for t in range(min(steps, cfg.iterations)))]
    samples = [row for row in read_log(out / "samples.jsonl") if ("eval", row["iteration"]) in have]
    for name, rows in {"seeds.jsonl": seeds, "metrics.jsonl": metrics, "samples.jsonl": samples,
                       "config.json": [vars(cfg)]}.items():  # rid of what a kill left half written
        replace(out / name, lambda draft: draft.write_text(dump(rows), encoding="utf-8"))
    if first.get("threads", origin["threads"]) != origin["threads"]:
        print(f"warning: the run had {first['threads']} threads a process: results may differ")
    return done, logged, have

# ---- The program ---------------------------------------------------------------------------------
def prepare(given: dict[str, Any]) -> tuple[Config, Task, LM, list[Example], list[Example]]:
    """Flags over the task's settings over defaults -> settings, task, model, two prompt lists."""
    if replay := given.get("replay"):  # its settings are the log's
        first, _, steps = read_seeds(Path(replay))
        given = {key: first[key] for key in first if key in Config.__dataclass_fields__} | dict(
            eval_every=0, save_every=0, iterations=steps) | given
        require(0 < given["iterations"] <= steps, f"--replay {replay} has {steps} iterations")
    cfg = Config(**given)
    name = cfg.task or ("toy" if cfg.model == "tiny" else "countdown")
    now = time.strftime("%Y%m%d-%H%M%S")
    out = Path(cfg.out or f"runs/{Path(name).stem}-{Path(cfg.model).name}-{now}")
    files = os.listdir(out) if out.is_dir() else ["a file"] * out.exists()
    ours = "seeds.jsonl" in files or all(file.startswith("seeds.") for file in files)
    require(not files or cfg.resume and ours, f"--out {out} is not empty: give another or --resume")
    task = (Task(name, [], [], None, None, 1, (), {}) if replay else
            load_task(name, cfg.data, cfg.seed))
    cfg = Config(**task.defaults | given)
    cfg = dataclasses.replace(cfg, task=name, out=str(out), alpha=cfg.alpha or cfg.sigma / 2,
                              max_new_tokens=cfg.max_new_tokens or task.max_new_tokens)
    lm = load_model(cfg, task.stop, pick_device(cfg.device))
    return (cfg, task, lm, encode(lm, task.train, cfg.chat, "training"),
            encode(lm, task.heldout[:cfg.eval_size or None], cfg.chat, "held-out"))

def run(given: dict[str, Any], dist: Dist) -> None:
    """One whole run, on every rank."""
    cfg, task, lm, train, heldout = dist.rank0_first(lambda: prepare(given))
    # Rank 0's: --out may hold the time of day, and a user's task need not give all the same rows.
    cfg, train, heldout = dist.gather(lambda: (cfg, train, heldout))[0]
    out, device, settings = Path(cfg.out), lm.model.device, dataclasses.asdict(cfg)
    home = "cpu" if cfg.theta_device == "cpu" else device
    pin = home == "cpu" and device.type == "cuda"
    theta = {name: torch.empty(p.shape, dtype=torch.float32, device=home, pin_memory=pin)
             .copy_(p.detach()) for name, p in lm.params.items()}
    say = functools.partial(print, flush=True) if dist.rank == 0 else lambda text: None
    log = lambda file, *lines: dist.rank0(lambda: append(out / file, *lines))
    # The seed log depends on all settings but these, which may change on resuming:
    free = {"model", "data", "out", "resume", "replay", "iterations", "eval_every", "eval_size",
            "save_every", "device", "theta_device", "timeout_minutes"}
    kind = (torch.cuda.get_device_name if device.type == "cuda" else
            torch.backends.cpu.get_cpu_capability)()  # `randn` may differ between kinds
    origin = {key: value for key, value in settings.items() if key not in free} | dict(
        dtype=str(lm.model.dtype).removeprefix("torch."), machine=f"{device.type} {kind}",
        torch=torch.__version__,
        threads=torch.get_num_threads(), base=digest(dict(lm.model.named_parameters())),
        rows=None if cfg.replay else mix(re.sub("0x[0-9a-f]+", "", repr(train))))  # no addresses
    done, logged, have = dist.rank0(lambda: open_run(lm, theta, cfg, origin))
    dist.broadcast(theta, dict.fromkeys(theta, 0))
    load_(lm.params, theta)
    log("metrics.jsonl", origin | dict(
        kind="run", iteration=done, command=sys.argv, config=settings, world=dist.world,
        transformers=sys.modules["transformers"].__version__, python=sys.version,
        sha256=hashlib.sha256(Path(__file__).read_bytes()).hexdigest()))
    weights = sum(p.numel() for p in theta.values())
    say(f"{cfg.model}: {weights:,} weights, {origin['dtype']}, {dist.world} x {device.type} | "
        f"{cfg.task}: {len(train)} rows, {len(heldout)} held out | N {cfg.population}, sigma "
        f"{cfg.sigma:g}, alpha {cfg.alpha:g} | {out}, from iteration {done}")
    file = out / "checkpoint/theta.safetensors"
    save = lambda: dist.rank0(lambda: save_checkpoint(file, theta, done))
    first, start, rss_unit = done, clock(device), 1 if sys.platform == "darwin" else 1024
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, on_signal)
    try:
        while True:
            state = agree(theta, done, cfg, logged, dist)
            if heldout and due(done, cfg.eval_every, cfg.iterations) and ("eval", done) not in have:
                line, samples = evaluate(lm, theta, task, heldout, cfg, done, dist)
                log("samples.jsonl", *samples)
                log("metrics.jsonl", line)
                say("held-out after {iteration}: accuracy {accuracy:.3f} +- {stderr:.3f}, reward "
                    "{reward:.3f} +- {reward_stderr:.3f} (n = {n})".format(**line))
            if done > first and due(done, cfg.save_every, cfg.iterations): save()
            if done == cfg.iterations: break
            t, begin, seconds, new = done + 1, clock(device), 0.0, done + 1 not in logged
            # ---- TRAINING BEGIN: these lines are the algorithm; what follows logs and measures
            if new:  # else the run is resumed, or replayed, and the log has it
                size = min(cfg.batch or len(train), len(train))
                picked = random.Random(mix(cfg.seed, t)).sample(range(len(train)), size)
                batch = [train[i] for i in sorted(picked)]  # by (seed, t); the shortest first
                R, texts, seconds = evaluate_population(  # (N + 1, P, 1), the last the parent
                    lm, theta, range(cfg.population + 1), batch, [task.reward], cfg, t, dist)
                logged[t] = dict(iteration=t, theta=state, F=fitness(R[..., 0]),
                                 tokens=sum(text.tokens for text in texts),
                                 clipped=sum(text.clipped for text in texts) / len(texts))
                log("seeds.jsonl", logged[t])  # before the step, which can then be done again
            took = logged[t]
            *F, parent = took["F"]  # of the N offspring, and of the parent
            scored = clock(device)
            w = shape_fitness(F, cfg.shaping)  # (N,)
            step = update_(theta, w, cfg.alpha, cfg.seed, t, cfg.mirrored, device, dist)
            moved = load_(lm.params, theta)  # how many weights of the model differ from before
            # ---- TRAINING END
            done, now = t, clock(device)
            row = dict(
                kind="train", iteration=t, reward_mean=statistics.fmean(F),
                reward_std=statistics.pstdev(F), reward_min=min(F), reward_max=max(F),
                parent_reward=parent, frac_better=sum(f > parent for f in F) / len(F),
                unique=len(set(F)), update_norm=step, frac_moved=moved / weights,
                tokens=took["tokens"], clipped=took["clipped"], seconds=now - begin,
                seconds_rollout=scored - begin - seconds, seconds_perturb=seconds,
                seconds_update=now - scored, tokens_per_second=took["tokens"] * new / (now - begin),
                eta_seconds=(now - start) / (t - first) * (cfg.iterations - t),
                peak_memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * rss_unit)
            if ("train", t) not in have: log("metrics.jsonl", row)
            say("{iteration:4d}/{} | parent {parent_reward:8.4f} | offspring {reward_mean:8.4f} +- "
                "{reward_std:.4f} | better {frac_better:4.0%} | step {update_norm:.3g} | "
                "{tokens_per_second:5.0f} tok/s | {seconds:6.2f} s | ETA {}".format(
                    cfg.iterations, timedelta(seconds=round(row["eta_seconds"])), **row))
            for text in warnings(F, parent, took["clipped"]):
                if ("warning", text) not in have:  # each once
                    have.add(("warning", text))
                    say(f"warning: {text}")
                    log("metrics.jsonl", dict(kind="warning", iteration=t, text=text))
    except SystemExit:  # a signal
        save()
        say(f"stopped after iteration {done}: the same command with --resume goes on")
        raise
    log("seeds.jsonl", dict(iteration=done + 1, theta=state))  # the last digest
    dist.rank0(lambda: replace(out / "model", lambda folder: save_model(lm, folder)))
    log("metrics.jsonl", dict(kind="end", iteration=done, seconds=clock(device) - start))
    samples = dist.rank0(lambda: read_log(out / "samples.jsonl"))
    before = {sample["row"]: sample["text"] for sample in reversed(samples)}
    for new in [sample for sample in samples if sample["iteration"] == done][:3]:
        say("\n{prompt!r}\n  before: {!r}\n  after:  {text!r}".format(before[new["row"]], **new))
    say(f"{out / 'model'} holds the model after {done} iterations")

def main(argv: list[str] | None = None) -> int:
    """The program -> its exit code: 0, or 2 after a word on bad input. SystemExit on a signal."""
    try:
        given = parse(sys.argv[1:] if argv is None else argv)
        run(given, Dist.start(Config(**given).timeout_minutes))
        return 0
    except UserError as e:
        if os.environ.get("RANK", "0") == "0": print(f"error: {e}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        STOP.clear()
        if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()

if __name__ == "__main__":
    sys.exit(main())
