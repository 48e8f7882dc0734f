"""The public methods: each binds one method's settings to the shell, and says what it needs at the end of a task."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from alasso import importance
from alasso._distributed import local
from alasso._frames import users_stacklevel
from alasso._soundness import check_importance
from alasso._unseen import count_unseen_steps
from alasso.errors import AlassoError, DivergedError
from alasso.importance._objectives import Loss
from alasso.methods.alasso import AlassoSurrogate, OmegaRule, Unmoved
from alasso.methods.base import Surrogate
from alasso.methods.ewc import EWCSurrogate, OnlineEWCSurrogate
from alasso.methods.imm import IMMSurrogate, Merge, Start, Transfer
from alasso.methods.mas import MASSurrogate
from alasso.methods.si import SISurrogate
from alasso.regularizer import Head, Loader, Regularizer

Labels = Literal["true", "sampled", "expected", "uniform"]


class ALASSO(Regularizer):
    """Asymmetric loss approximation with single-side overestimation (Park et al., ICCV 2019).

    The defaults are the constants of the authors' permuted-MNIST experiment. Keywords, in the paper's letters:

    ``a``, ``epsilon``  overestimation of the unobserved side, Eq. 5
    ``c``  weight of the past against the present, Eq. 6
    ``a_prime``, ``c_prime``, ``epsilon_prime``  the decoupled ones of Eq. 12; set them to a, c, ε for no decoupling
    ``xi``  added to the squared distance in Eq. 7's denominator; small convolutional networks want 1e-3
    ``monotone``  Ω never falls; not in the paper's text, but its published numbers need it
    ``omega_rule``  "accurate", Eq. 7, or "si", Eq. 3
    ``unmoved``  a weight that stood still is "unobserved" on both sides (Eq. 5) or counts as "moved_right";
    "sign_of_omega" is the latter with the side lost where Ω = 0, as in the authors' program
    ``exclude``  shell-style patterns of parameter names to leave alone

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> reg = ALASSO(model, a=1.8, c=1.0).attach(optimizer)
    >>> for _ in range(3):                                      # task 1, in your own loop
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     _ = optimizer.step()
    >>> reg.consolidate()
    >>> reg.penalty().item()                                    # at the anchor, nothing to pay
    0.0
    """

    method = "ALASSO"
    a: float
    c: float
    a_prime: float
    c_prime: float
    epsilon: float
    epsilon_prime: float
    xi: float
    monotone: bool
    omega_rule: OmegaRule
    unmoved: Unmoved

    def __init__(
        self,
        model: nn.Module,
        a: float = 1.8,
        c: float = 1.0,
        a_prime: float = 1.0,
        c_prime: float = 1.0,
        epsilon: float = 1e-6,
        epsilon_prime: float = 0.0,
        xi: float = 0.1,
        monotone: bool = True,
        *,
        omega_rule: OmegaRule = "accurate",
        unmoved: Unmoved = "moved_right",
        exclude: Iterable[str] = (),
    ) -> None:
        surrogate = AlassoSurrogate(a, c, a_prime, c_prime, epsilon, epsilon_prime, xi, monotone, omega_rule, unmoved)
        super().__init__(model, surrogate, exclude)

    @classmethod
    def as_the_authors_ran_it(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """The published experiment: monotone Ω, ξ = 0.1, a weight that stood still counts as moved right.

        ``unmoved="sign_of_omega"`` is closer still to their program, which loses the side where Ω = 0.
        """
        return cls(model, **{"unmoved": "moved_right", **changes})

    @classmethod
    def as_the_paper_states_it(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """Eqs. 4 to 12 to the letter: Ω may fall, no damping, one ε. This does not give the paper's numbers."""
        epsilon = changes.get("epsilon", 1e-6)
        own = {"monotone": False, "xi": 0.0, "epsilon_prime": epsilon, "unmoved": "unobserved"}
        return cls(model, **{**own, **changes})

    @classmethod
    def asymmetric_only(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """The paper's first ablation: the asymmetric surrogate, Eq. 5, on SI's Ω, Eq. 3."""
        return cls(model, **{"omega_rule": "si", **changes})

    @classmethod
    def accurate_only(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """The paper's second ablation: the accurate Ω, Eq. 7, in a symmetric surrogate."""
        return cls(model, **{"a": 1.0, "epsilon": 0.0, **changes})


class SI(Regularizer):
    """Synaptic intelligence (Zenke et al., ICML 2017). ``c``: strength; ``xi``: damping where a weight hardly moved."""

    method = "SI"
    c: float
    xi: float

    def __init__(self, model: nn.Module, c: float = 0.1, xi: float = 0.1, *, exclude: Iterable[str] = ()) -> None:
        super().__init__(model, SISurrogate(c, xi), exclude)


class _FromData(Regularizer):
    """A method whose importance is measured on the task's data, after training."""

    def _measure(self, loader: Loader, head: Head | None) -> dict[str, Tensor]:
        raise AssertionError("each method measures its own importance")

    def consolidate(self, loader: Loader | None = None, *, head: Head | None = None) -> None:
        """End of a task: measure importance on ``loader`` (any iterable of (x, y)) and take the weights as anchor.

        ``head`` post-processes the model's output, for example to keep only the task's own classes.
        """
        if loader is None:
            raise AlassoError(f"{self.method} measures importance on data; pass consolidate() the task's loader")
        if self.tasks > 0 and self.steps == 0 < self.unseen_steps and not self.penalty_was_taken:
            warnings.warn(
                f"{self.method} has seen none of {self.unseen_steps} optimizer steps since the last consolidate(), so "
                "nothing protected the past meanwhile; attach() the optimizer, or add penalty() to the loss",
                stacklevel=users_stacklevel(),
            )
        self._look_again()
        with torch.inference_mode(False), torch.enable_grad():
            measured = self._measure(loader, head)
        self._consolidate(measured)
        count_unseen_steps(self)  # from the first task's end on there is something to protect


class _FromFisher(_FromData):
    """Importance is the diagonal Fisher information. ``labels``: of the log-likelihood of which labels; ``loss``: in
    place of cross-entropy, where the model does not tell classes apart.
    """

    def __init__(
        self, model: nn.Module, surrogate: Surrogate[Any], labels: Labels, loss: Loss | None, exclude: Iterable[str]
    ) -> None:
        super().__init__(model, surrogate, exclude)
        check_labels(labels, loss)
        self.labels, self.loss = labels, loss

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "labels": self.labels}

    def take_settings(self, saved: Mapping[str, Any]) -> None:
        labels = saved.get("labels", self.labels)  # which states did not hold at first
        check_labels(labels, self.loss)
        super().take_settings(saved)
        self.labels = labels

    def _measure(self, loader: Loader, head: Head | None) -> dict[str, Tensor]:
        parameters = dict(self.protected())
        return importance.fisher(
            self.model, loader, labels=self.labels, loss=self.loss, parameters=parameters, head=head
        )


def check_labels(labels: Labels, loss: Loss | None) -> None:
    if labels not in get_args(Labels):
        raise AlassoError(f"labels must be one of {', '.join(get_args(Labels))}, not {labels!r}")
    if loss is not None and labels != "true":
        raise AlassoError(f'a loss of your own is taken at the given targets: leave labels="true", not {labels!r}')


class EWC(_FromFisher):
    """Elastic weight consolidation (Kirkpatrick et al., 2017): the exact sum of a quadratic a task, at the cost of one.

    ``lam``: λ of the penalty ½λ Σ F d². ``labels``: whose log-likelihood the Fisher is of, the "true" labels', labels
    "sampled" from the model, the model's "expected" value over all classes, or the "uniform" mean over them, which
    does not vanish where the model is certain and wants a far smaller ``lam`` (0.3 on permuted MNIST, where the true
    labels want 300). ``loss``: a negative log-likelihood of your own, one value a sample, for
    targets that are no classes; for a regression ``lambda output, y: (output - y).square().sum(1) / 2``.
    """

    method = "EWC"
    lam: float
    anchors_are_weights = False  # they are the centre of all springs

    def __init__(
        self,
        model: nn.Module,
        lam: float = 100.0,
        *,
        labels: Labels = "true",
        loss: Loss | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        super().__init__(model, EWCSurrogate(lam), labels, loss, exclude)


class OnlineEWC(_FromFisher):
    """Online EWC (Schwarz et al., 2018): a quadratic at the latest weights, its Fisher a sum decaying by ``gamma``.

    The other arguments are those of :class:`EWC`.
    """

    method = "OnlineEWC"
    lam: float
    gamma: float

    def __init__(
        self,
        model: nn.Module,
        lam: float = 100.0,
        gamma: float = 1.0,
        *,
        labels: Labels = "true",
        loss: Loss | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        super().__init__(model, OnlineEWCSurrogate(lam, gamma), labels, loss, exclude)


class MAS(_FromData):
    """Memory aware synapses (Aljundi et al., 2018): importance from the outputs' sensitivity; labels are not used."""

    method = "MAS"
    lam: float

    def __init__(self, model: nn.Module, lam: float = 1.0, *, exclude: Iterable[str] = ()) -> None:
        super().__init__(model, MASSurrogate(lam), exclude)

    def _measure(self, loader: Loader, head: Head | None) -> dict[str, Tensor]:
        parameters = dict(self.protected())
        return importance.squared_output_norm(self.model, loader, parameters=parameters, head=head)


class IMM(_FromFisher):
    """Incremental moment matching (Lee et al., 2017): after each task the model takes the merged weights of all so far.

    ``merge``  "mean" averages the tasks' weights; "mode" weighs them by their Fisher information, and needs a loader
    ``transfer``  "weight", "l2", "drop" or "l2-drop": those with l2 pay ``lam``·‖θ − θ_{k−1}‖² through :meth:`attach`;
    those with drop are to be trained within :class:`alasso.methods.imm.DropTransfer`
    ``last_weight``  share of the newest task in the merged weights, None for all tasks alike
    ``start``  the next task begins at the "merged" weights, or, as in the paper, at the "last" task's own, which
    :meth:`begin_task` puts back
    ``count_unmoved``  whether the mean counts a weight that a task left exactly where it was
    ``labels``, ``loss``  what the Fisher information is of, as in :class:`EWC`

    Consolidation changes the weights: begin the next task with a new optimizer, or one whose state is reset.
    """

    method = "IMM"
    anchors_are_weights = False  # but the last task's own, before merging
    merge: Merge
    transfer: Transfer
    lam: float
    last_weight: float | None
    start: Start
    count_unmoved: bool
    surrogate: IMMSurrogate

    def __init__(
        self,
        model: nn.Module,
        merge: Merge = "mean",
        *,
        transfer: Transfer = "weight",
        lam: float = 1e-4,
        last_weight: float | None = None,
        start: Start = "merged",
        count_unmoved: bool = False,
        labels: Labels = "true",
        loss: Loss | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        surrogate = IMMSurrogate(merge, transfer, lam, last_weight, start, count_unmoved)
        if loss is not None and merge != "mode":
            raise AlassoError("mean-IMM measures nothing, and needs no loss: leave it out")
        super().__init__(model, surrogate, labels, loss, exclude)

    def consolidate(self, loader: Loader | None = None, *, head: Head | None = None) -> None:
        """End of a task: merge its weights with the past's and put the result into the model."""
        self._look_again()
        self._check_weights()
        measured: dict[str, Tensor] = {}
        if self.surrogate.merge == "mode":
            if loader is None:
                raise AlassoError("mode-IMM measures the Fisher information; pass consolidate() the task's loader")
            with torch.inference_mode(False), torch.enable_grad():
                measured = self._measure(loader, head)
            check_importance(measured, (p for _, p in self.protected()))
        with torch.no_grad():
            self._consolidate(measured)
            for name, parameter in self.protected():
                self._take_merged(name, parameter)

    @torch.no_grad()
    def begin_task(self) -> None:
        """With ``start="last"``, put the last task's own weights back into the model; nothing otherwise."""
        if self.surrogate.start == "last" and self.tasks > 0:
            for name, parameter in self.protected():
                local(parameter).copy_(self.state_of(name, parameter).anchor)

    def _take_merged(self, name: str, parameter: nn.Parameter) -> None:
        state = self.state_of(name, parameter)
        local(parameter).copy_(self.surrogate.merged(state, self._theta(parameter)))
        if self.surrogate.start == "merged":
            # A parameter in half precision takes the merged weights rounded: the next task starts there.
            self._states[name] = state._replace(anchor=self._theta(parameter).clone())

    def _check_weights(self) -> None:
        for name, parameter in self.protected():
            if not bool(torch.isfinite(local(parameter)).all()):
                raise DivergedError(
                    f"{name} holds NaN or infinite weights: the training diverged (a smaller learning rate helps); "
                    "the state before this consolidation is kept"
                )


#: Public methods by name.
METHODS: dict[str, type[Regularizer]] = {cls.method: cls for cls in (ALASSO, SI, EWC, OnlineEWC, MAS, IMM)}
