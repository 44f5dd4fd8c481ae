"""The model, the policy and the learner of a plan."""

from pathlib import Path

from streamclr.base.errors import UserError
from streamclr.base.options import parse_size
from streamclr.compute.device import find_device
from streamclr.compute.fast_scoring import check_precision
from streamclr.encoders.architecture import Architecture
from streamclr.encoders.inference import seeded
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.weights import INITS, model_from
from streamclr.guards import Guarded
from streamclr.learner import Learner
from streamclr.models.pretrained import from_pretrained
from streamclr.policy import ContrastScoring, Policy, build_policy, policy_options
from streamclr.recipe import PAPER
from streamclr.records.options import ModelOptions
from streamclr.records.plan import RunPlan, resolve_architecture
from streamclr.scenes import REACH
from streamclr.views import build_views


def initial_model(options: ModelOptions, size: int) -> ContrastiveModel:
    """What a run starts from: public or random weights, an encoder from a file, or a model with its projection head."""
    asked = resolve_architecture(options, size)
    init = asked.usual_init if options.init is None else options.init
    if init in INITS or not Path(init).is_dir():
        with seeded(options.seed):
            return model_from(asked, size, init)
    pretrained = from_pretrained(init)
    if (its := pretrained.architecture) != asked:
        own = zip(Architecture._fields, its, asked, strict=True)
        flags = " ".join(f"--{name} {value}" for name, value, other in own if value != other)
        raise UserError(f"{init} is {its}, not {asked}: give {flags}")
    return pretrained.model


def public_model(plan: RunPlan) -> ContrastiveModel | None:
    """The model as it was before the run; None if the run began with random weights."""
    return initial_model(plan, plan.size).to(find_device(plan.device)) if plan.init != "random" else None


def make_policy(plan: RunPlan) -> Policy:
    """The policy `name?key=value`, with the run's seed, temperature and re-scoring period where it takes them."""
    if plan.rescore_every is not None and "rescore_every" not in policy_options(plan.policy):
        raise UserError(f"--rescore-every is for the policy contrast: {plan.policy} does not score lazily")
    names = ("seed", "temperature", "fresh", "rescore_every")
    policy = build_policy(plan.policy, **{name: getattr(plan, name) for name in names})
    return policy if plan.guards == "off" else Guarded(policy, plan.guards)


def make_learner(plan: RunPlan) -> Learner:
    policy = make_policy(plan)  # mistakes come first: weights may have to be downloaded
    if plan.memory is not None:
        parse_size(plan.memory)
    find_device(plan.device)
    model = initial_model(plan, plan.size)
    chosen = policy.policy if isinstance(policy, Guarded) else policy
    if isinstance(chosen, ContrastScoring):
        check_precision(model, chosen.precision)
    return Learner(
        model,
        policy,
        buffer=plan.buffer,
        batch_size=plan.batch,
        updates_per_segment=plan.updates,
        temperature=plan.temperature,
        optimizer=plan.optimizer,
        lr=plan.lr,
        lr_half=plan.lr_half,
        weight_decay=plan.weight_decay,
        loss=plan.loss,
        views=build_views(plan.views, plan.crop or PAPER.crop, plan.flip or PAPER.flip, plan.side or PAPER.side),
        weak_view=plan.weak_view,
        positives=plan.positives or "views",  # a plan of an earlier version does not say
        train=plan.train or "all",
        reach=plan.reach or REACH,
        precision=plan.precision,
        kept_views=plan.kept_views,
        memory=plan.memory,
        compile=plan.compile,
        seed=plan.seed,
        device=plan.device,
    )
