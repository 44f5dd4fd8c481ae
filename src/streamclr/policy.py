"""The replacement policies: pool in, indices to keep out. Which N images of B ∪ I become the new B?"""

import math
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamclr.base import options as opts
from streamclr.base import plugins
from streamclr.base.errors import UserError
from streamclr.base.options import checked_seed, one_of, shown
from streamclr.base.statistics import uniform
from streamclr.buffer import Buffer, Pool
from streamclr.compute.fast_scoring import PRECISIONS, fastest
from streamclr.encoders.inference import holds_generator, infer, infer_views, inference_mode
from streamclr.loss import nt_xent
from streamclr.peers.min_red import MinRed
from streamclr.peers.scale import SCALE
from streamclr.score import contrast_score, rank_correlation, stand_ins
from streamclr.views import StrongViews


class Policy(Protocol):
    """Decides which images of the buffer and the new segment stay: any class with this method, which never sees labels.

    A policy may also have a method `draw`, as ScoredReservoir has: which images of the buffer an update takes.

    >>> import torch
    >>> from streamclr import Learner, Policy, resnet18
    >>> class Brightest:
    ...     def keep(self, pool, size, model):
    ...         return pool.images.float().mean((1, 2, 3)).topk(size).indices
    >>> policy: Policy = Brightest()
    >>> learner = Learner(resnet18(width=4), policy, buffer=4)
    >>> images = torch.randint(100, (8, 3, 16, 16), dtype=torch.uint8)
    >>> images[::2] += 100
    >>> step = learner.learn_many(images)
    >>> sorted(learner.buffer.arrivals.tolist())
    [0, 2, 4, 6]
    """

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        """The indices of the `size` images of the pool that stay, each once, in any order."""


def draw_batch(policy: Policy, buffer: Buffer, n: int, model: nn.Module, generator: torch.Generator) -> Tensor:
    """The rows of the buffer that an update takes: as the policy says, else uniformly."""
    draw = getattr(policy, "draw", None)
    return buffer.draw(n, generator) if draw is None else draw(buffer, n, model, generator)


class ContrastScoring:
    """Keep the images whose mirror image the encoder still tells apart (Sec. III-B; lazy scoring, Sec. III-D).

    rescore_every: T; an image in the buffer is scored again when its age is a multiple of it.
    precision: `fp32` scores exactly; `int8` and `half` are faster; `auto` takes the fastest on this machine,
        as long as it ranks the images as the exact score does.
    duplicate: a frame whose pixels differ from the frame before by at most this (mean, of 255) takes over its score
        and is not encoded; below 0: every frame is encoded.
    fresh: the share of the buffer that is replaced in a step at least. Scores fall as the encoder learns, so that with
        lazy scoring an old score is a high one, and the buffer would hardly move.

    >>> import torch
    >>> from streamclr import ContrastScoring, Learner, resnet18
    >>> learner = Learner(resnet18(width=4), ContrastScoring(rescore_every=3), buffer=8)
    >>> segments = torch.randint(256, (3, 8, 3, 16, 16), dtype=torch.uint8)
    >>> [learner.learn_many(images).rescored for images in segments]
    [0.0, 0.0, 0.0]
    >>> bool(((learner.buffer.scores >= 0) & (learner.buffer.scores <= 2)).all())
    True
    """

    __repr__ = shown

    def __init__(self, rescore_every: int = 1, precision: str = "fp32", duplicate: float = 0.5, fresh: float = 0.0):
        if rescore_every < 1:
            raise UserError(f"rescore_every is {rescore_every}: use 1 (score everything each step) or more")
        if not 0 <= fresh <= 1:
            raise UserError(f"fresh is {fresh}: use 0 (the scores alone decide) to 1 (the whole buffer)")
        if precision not in ("auto", *PRECISIONS):
            raise UserError(f"precision is {precision!r}: {one_of(precision, ('auto', *PRECISIONS))}")
        self.rescore_every, self.precision, self.duplicate, self.fresh = rescore_every, precision, duplicate, fresh
        # Of `auto` only:
        self._fast = ""  # the fastest precision, once measured
        self._trusted = True  # whether it ranked the images as the exact score did at the last check
        self._n_fast = 0  # calls in which it was used

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        due = pool.age % self.rescore_every == 0  # a new image has age 0
        due |= pool.score.isnan()  # kept by another policy before
        new = (pool.age == 0).nonzero()[:, 0]
        stand_in = new[stand_ins(pool.images[new], self.duplicate)]
        due[new] = stand_in == new
        pool.rescore(due, self._score(model, pool.images[due]))
        pool.score[new] = pool.score[stand_in]
        return self._refreshed(pool, pool.score.topk(size).indices)

    def _refreshed(self, pool: Pool, best: Tensor) -> Tensor:
        """The best, with the best of the other new images in place of the last old ones if too few new ones are in."""
        rest = pool.age == 0
        n = min(math.ceil(self.fresh * len(best)), int(rest.sum())) - int(rest[best].sum())
        if n <= 0:
            return best
        rest[best] = False
        entering = pool.score.where(rest, -torch.inf).topk(n).indices
        old = (pool.age[best] > 0).nonzero()[:, 0]
        best[old[-n:]] = entering  # the scores of the best fall
        return best

    def _score(self, model: nn.Module, images: Tensor) -> Tensor:
        if self.precision != "auto":
            return contrast_score(model, images, self.precision)
        if len(images) < MIN_IMAGES_FOR_FAST:
            return contrast_score(model, images)
        if not self._fast:
            with inference_mode(model):
                self._fast = fastest(model, images)
        if self._fast == "fp32":
            return contrast_score(model, images)
        check = self._n_fast % CHECK_EVERY == 0
        self._n_fast += 1
        if check:
            few = images[:: -(-len(images) // 128)]
            agreement = rank_correlation(contrast_score(model, few, self._fast), contrast_score(model, few))
            self._trusted = agreement >= MIN_RANK_CORRELATION
        return contrast_score(model, images, self._fast if self._trusted else "fp32")

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self._fast, "trusted": self._trusted, "n_fast": self._n_fast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._fast, self._trusted, self._n_fast = state["fast"], state["trusted"], state["n_fast"]
        if self._fast == "folded":  # in states of earlier versions, and what fp32 is now
            self._fast = "fp32"


MIN_IMAGES_FOR_FAST = 64  # with fewer, making the fast model costs more than it saves
CHECK_EVERY = 100  # calls between two comparisons of the fast with the exact score
MIN_RANK_CORRELATION = 0.98  # Spearman's, of the fast with the exact score


class FIFOReplace:
    """Keep the newest images; with segments as large as the buffer this is the same as no buffer.

    >>> import torch
    >>> from streamclr import FIFOReplace, Learner, resnet18
    >>> learner = Learner(resnet18(width=4), FIFOReplace(), buffer=4)
    >>> step = learner.learn_many(torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8))
    >>> sorted(learner.buffer.arrivals.tolist())
    [2, 3, 4, 5]
    """

    __repr__ = shown

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        return pool.arrival.topk(size).indices


class _Seeded:
    """A private generator and its state, for policies that draw at random."""

    __repr__ = shown

    def __init__(self, seed: int = 0):
        self.seed, self.generator = seed, torch.Generator().manual_seed(checked_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class RandomReplace(_Seeded):
    """Keep a uniform draw of the pool, so that an image survives a step with probability |B| / (|B| + |I|).

    >>> import torch
    >>> from streamclr import Learner, RandomReplace, resnet18
    >>> learner = Learner(resnet18(width=4), RandomReplace(seed=1), buffer=4)
    >>> step = learner.learn_many(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8))
    >>> learner.buffer, learner.buffer.n_seen
    (Buffer(4 of 4, 3 x 16 x 16), 8)
    """

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        return torch.randperm(len(pool), generator=self.generator)[:size].to(pool.age.device)


class Reservoir(_Seeded):
    """Keep a uniform draw of the whole stream so far (Vitter 1985): the images with the largest random keys.

    horizon: the draw fades, so that it is of about this many times as many images as the buffer holds, the newest ones,
        and the buffer goes on moving; None: of the whole stream.

    >>> import torch
    >>> from streamclr import Learner, Reservoir, resnet18
    >>> learner = Learner(resnet18(width=4), Reservoir(seed=1), buffer=4)
    >>> for images in torch.randint(256, (3, 8, 3, 16, 16), dtype=torch.uint8):
    ...     step = learner.learn_many(images)
    >>> learner.buffer, learner.buffer.n_seen
    (Buffer(4 of 4, 3 x 16 x 16), 24)
    """

    def __init__(self, seed: int = 0, horizon: float | None = None):
        if horizon is not None and not horizon > 0:
            raise UserError(f"horizon is {horizon}: use a number above 0, or leave it out for the whole stream")
        super().__init__(seed)
        self.horizon = horizon

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        new = pool.age == 0
        keys = torch.rand(int(new.sum()), generator=self.generator)
        if self.horizon is not None:
            # The largest keys are a draw by the weights exp(arrival / horizon) (Gumbel; Efraimidis and Spirakis 2006).
            keys = -(-keys.log()).log() + pool.arrival[new].cpu() / (self.horizon * size)
        pool.rescore(new, keys.to(pool.score))
        return pool.score.topk(size).indices


class SelectiveBackprop(_Seeded):
    """Keep the images with the largest contrastive losses (Jiang et al. 2019, as the paper uses it).

    beta: None keeps the largest losses; a number draws with probability (percentile of the loss) ** beta, as the paper
        of 2019 does.

    >>> import torch
    >>> from streamclr import Learner, SelectiveBackprop, resnet18
    >>> learner = Learner(resnet18(width=4), SelectiveBackprop(seed=1), buffer=4)
    >>> step = learner.learn_many(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8))
    >>> bool((learner.buffer.scores > 0).all())  # the losses
    True
    """

    def __init__(self, beta: float | None = None, temperature: float = 0.5, seed: int = 0):
        if beta is not None and not beta >= 0:
            raise UserError(f"beta is {beta}: use 0 (uniform) or more, or leave it out for the largest losses")
        if not temperature > 0:
            raise UserError(f"temperature is {temperature}: use a number above 0")
        super().__init__(seed)
        self.beta, self.temperature = beta, temperature
        self.views = StrongViews()

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        # Views drawn on the CPU, so that one generator serves every device.
        z0, z1 = (infer_views(model, self.views(pool.images.cpu(), self.generator)) for _ in range(2))
        losses = nt_xent(z0, z1, self.temperature, reduction="none").view(2, -1).mean(0)
        pool.rescore(pool.age >= 0, losses)
        if self.beta is None:
            return pool.score.topk(size).indices
        percentile = (pool.score.argsort().argsort() + 1) / len(pool)
        # The largest of log(u) / weight are a draw without replacement by weight (Efraimidis and Spirakis 2006).
        u = torch.rand(len(pool), generator=self.generator).to(pool.score)
        return (u.log() / percentile**self.beta).topk(size).indices


class KCenter(_Seeded):
    """Keep a greedy k-center cover of the pool in feature space (Sener and Savarese 2018).

    >>> import torch
    >>> from streamclr import KCenter, Learner, resnet18
    >>> learner = Learner(resnet18(width=4), KCenter(seed=1), buffer=4)
    >>> images = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8).repeat_interleave(2, dim=0)  # each of four twice
    >>> step = learner.learn_many(images)
    >>> sorted((learner.buffer.arrivals // 2).tolist())  # one of each
    [0, 1, 2, 3]
    """

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        features = infer(model, pool.images, getattr(model, "features", None))
        return k_center(features, size, first=int(torch.randint(len(pool), (), generator=self.generator)))


def k_center(features: Tensor, size: int, first: int = 0) -> Tensor:
    """`size` rows, each the farthest from those chosen before it; memory for one distance per row."""
    chosen = torch.empty(size, dtype=torch.long, device=features.device)
    distance = torch.full((len(features),), torch.inf, device=features.device)
    index = torch.tensor(first, device=features.device)
    for i in range(size):
        chosen[i] = index
        distance = torch.minimum(distance, (features - features[index]).square().sum(1))
        distance[index] = -1  # chosen once, even among duplicates
        index = distance.argmax()
    return chosen


class Mixture:
    """Part of the buffer by contrast score, the rest a uniform draw of the stream so far.

    share: of the buffer, by score.
    rescore_every: as of ContrastScoring.

    >>> import torch
    >>> from streamclr import Learner, Mixture, resnet18
    >>> learner = Learner(resnet18(width=4), Mixture(share=0.25), buffer=4)
    >>> step = learner.learn_many(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8))
    >>> learner.buffer, bool((learner.buffer.scores >= 0).all())
    (Buffer(4 of 4, 3 x 16 x 16), True)
    """

    __repr__ = shown

    def __init__(self, share: float = 0.5, rescore_every: int = 20, seed: int = 0):
        if not 0 <= share <= 1:
            raise UserError(f"share is {share}: use 0 (all by chance) to 1 (all by score)")
        self.share, self.seed, self.scoring = share, checked_seed(seed), ContrastScoring(rescore_every)

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        best = self.scoring.keep(pool, round(self.share * size), model)
        # A key that depends on the image's number alone: the largest keys so far are a uniform draw of the stream.
        keys = torch.from_numpy(uniform(pool.arrival.cpu().numpy(), self.seed)).to(pool.age.device)
        keys[best] = -1
        return torch.cat([best, keys.topk(size - len(best)).indices])

    def state_dict(self) -> dict[str, Any]:
        return self.scoring.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scoring.load_state_dict(state)


class ScoredReservoir(Reservoir):
    """A reservoir decides what stays, and the contrast score what is drawn from it for an update.

    times: so many times the batch are scored, and the highest scores are drawn.

    >>> import torch
    >>> from streamclr import Learner, ScoredReservoir, resnet18
    >>> learner = Learner(resnet18(width=4), ScoredReservoir(times=2), buffer=16, batch_size=4)
    >>> step = learner.learn_many(torch.randint(256, (16, 3, 16, 16), dtype=torch.uint8))
    >>> rows = learner.policy.draw(learner.buffer, 4, learner.model, learner.generator)
    >>> len(rows.unique())
    4
    """

    def __init__(self, times: int = 2, seed: int = 0, horizon: float | None = None):
        if times < 1:
            raise UserError(f"times is {times}: use 1 (no scores) or more")
        super().__init__(seed, horizon)
        self.times = times

    def draw(self, buffer: Buffer, n: int, model: nn.Module, generator: torch.Generator) -> Tensor:
        rows = buffer.draw(self.times * n, generator)
        return rows if len(rows) <= n else rows[contrast_score(model, buffer.images[rows]).topk(n).indices]


POLICIES: dict[str, type] = {
    "contrast": ContrastScoring,
    "random": RandomReplace,
    "fifo": FIFOReplace,
    "selective-bp": SelectiveBackprop,
    "k-center": KCenter,
    "reservoir": Reservoir,
    "min-red": MinRed,
    "scale": SCALE,
    "mixture": Mixture,
    "scored-reservoir": ScoredReservoir,
}


def policy_options(policy: str) -> list[str]:
    """The names of the options that a policy takes."""
    return plugins.takes("policy", opts.split(policy)[0], POLICIES)


def build_policy(policy: str, **usual: Any) -> Policy:
    """The policy `name?key=value`, built in or of a researcher.

    usual: values of options that are not given, for policies that take them; None: the policy's own.
    """
    built: Policy = plugins.make("policy", policy, POLICIES, **usual)
    return built


def listed_policies(policies: str) -> list[str]:
    """The policies of a list with commas between, each of which is there and named once."""
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"--policies {policies} names a policy twice: name each once")
    for name in names:
        build_policy(name)
    return names


def policy_state(policy: Policy) -> dict[str, Any]:
    return policy.state_dict() if hasattr(policy, "state_dict") else {}


def load_policy_state(policy: Policy, state: dict[str, Any]) -> None:
    if hasattr(policy, "load_state_dict"):
        policy.load_state_dict(state)


def load_saved_policy(policy: Policy, state: dict[str, Any], name: str | None) -> None:
    """Load what a learner has saved; if it does not fit, the policy is as before.

    name: of the policy that was saved; None in a state of an older version.
    """
    own, own_name = deepcopy(policy_state(policy)), policy_name(policy)
    saved = name or f"with the state ({', '.join(state)})"
    told = f"the saved state is of the policy {saved}, this learner has {own_name}"
    what_to_do = "give the learner the policy that was saved"
    if name not in (None, own_name) or (state and not hasattr(policy, "load_state_dict")):
        raise UserError(f"{told}: {what_to_do}")
    try:
        load_policy_state(policy, state)
    except Exception as error:  # noqa: BLE001 (any class may be a policy)
        load_policy_state(policy, own)
        raise UserError(f"{told} with ({', '.join(own)}), {error!r}: {what_to_do}") from None


def policy_name(policy: Policy) -> str:
    """The class of a policy, with that of the policy inside it: `Guarded(ContrastScoring)`."""
    inner = [policy_name(value) for value in getattr(policy, "__dict__", {}).values() if hasattr(value, "keep")]
    return type(policy).__name__ + (f"({', '.join(inner)})" if inner else "")


def check_resumable(policy: Policy) -> None:
    """Refuse a policy that draws from a generator of its own and does not save it: a resumed run would differ."""
    if holds_generator(policy) and not hasattr(policy, "state_dict"):
        raise UserError(
            f"the policy {type(policy).__name__} holds a random generator and cannot be saved: "
            "add state_dict and load_state_dict, as RandomReplace has them"
        )
    for value in getattr(policy, "__dict__", {}).values():
        if hasattr(value, "keep"):
            check_resumable(value)
