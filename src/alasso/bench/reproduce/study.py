"""All that one call of ``alasso reproduce`` works with: the study, what was chosen of it, and where things go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alasso.bench.data.version import refuse_changed_images
from alasso.bench.reproduce import show, stopwatch, timing
from alasso.bench.reproduce.claims import Claim, Claims, Judged, about, judge_all, read_claims
from alasso.bench.reproduce.document import QUICK_TEMPLATE, Document, template_of
from alasso.bench.reproduce.evidence import Evidence
from alasso.bench.reproduce.experiments import PAPER, Experiment, chosen, read_experiments
from alasso.bench.reproduce.plan import Plan, make_plan, results_in, runs_of
from alasso.bench.reproduce.show import OF_OWN, OF_PAPER, Words
from alasso.bench.results import checkpoint_path, result_path
from alasso.errors import AlassoError


@dataclass(frozen=True)
class Places:
    """Where results are, and where the document and the page go."""

    out: Path
    document: Path
    report: Path

    @staticmethod
    def chosen(
        quick: bool, out: Path | None, document: Path | None, report: Path | None, study: Path | None = None
    ) -> Places:
        """The quick version, a study of one's own and results elsewhere keep all together, away from the paper's."""
        of_paper = study is None
        own = "quick" if study is None else f"{study.resolve().name}{'-quick' if quick else ''}"
        out = out or (Path("results") if of_paper and not quick else Path("runs") / own)
        beside = {"document": out / "reproduction.md", "report": out / "report.html"}
        usual = {"document": Path("docs/reproduction.md"), "report": Path("runs/report.html")}
        where = usual if out.resolve() == Path("results").resolve() and of_paper and not quick else beside
        return Places(out, document or where["document"], report or where["report"])

    def refuse_mixture(self, work: Study) -> None:
        """Small runs do not go among real ones, whose folder a report shows as a whole."""
        if not work.quick:
            return
        small = {one.config(run).hash for one in work.experiments.values() for run in one.runs}
        others = [path for path, config_hash in results_in(self.out).items() if config_hash not in small]
        if others:
            raise AlassoError(
                f"{self.out} holds other results, such as {others[0].name}; --quick takes a folder of its own: --out …"
            )


@dataclass(frozen=True)
class Study:
    """Experiments (small ones where ``quick``), those chosen among them, claims, seeds, places."""

    folder: Path
    experiments: Mapping[str, Experiment]
    chosen: Sequence[Experiment]
    claims: Claims
    seeds: int | None
    quick: bool
    places: Places

    @staticmethod
    def read(
        folder: Path | None, only: Sequence[str], skip: Sequence[str], seeds: int | None, quick: bool, places: Places
    ) -> Study:
        folder = folder or PAPER
        whole = read_experiments(folder)
        claims = read_claims(folder, whole)
        experiments = whole
        if quick:
            experiments = read_experiments(folder, quick=True)
            for name in only:
                if name in whole and name not in experiments:
                    raise AlassoError(f"{name} has no quick version; those that have: {', '.join(experiments)}")
            claims = Claims([claim for claim in claims.tested if claim.quick and _within(claim, experiments)])
        some = chosen(experiments, only, [name for name in skip if name in experiments or name not in whole])
        if not some:
            raise AlassoError("no experiment is left to run; name fewer with --skip")
        return Study(folder, experiments, some, claims, seeds, quick, places)

    @property
    def words(self) -> Words:
        return OF_PAPER if self.folder == PAPER else OF_OWN

    def plan(self, device: str) -> Plan:
        return make_plan(self.chosen, self.seeds, self.places.out)

    def refuse_other_images(self) -> None:
        """Of runs on a folder of images, what is there must have been made on the images that are in it now."""
        there = []
        for config in runs_of(self.chosen, self.seeds).values():
            files = [path(config, self.places.out) for path in (result_path, checkpoint_path)]
            there += [(config, file) for file in files if file.exists()][:1]
        refuse_changed_images(there, "run into another --out, or judge what is there with --judge")

    def evidence(self) -> Evidence:
        return Evidence.of_folder(self.experiments, self.places.out)

    def estimate(self, plan: Plan, device: str, say: Callable[[str], None]) -> timing.Estimate:
        known = self.evidence().results_of(self.experiments)
        measure = stopwatch.Stopwatch(device, say)
        return timing.estimate(plan, known, self.places.out, stopwatch.device_name(device), measure, measure.moving)

    def judged(self, evidence: Evidence | None = None) -> list[Judged]:
        return judge_all(self.claims.tested, evidence or self.evidence())

    def claims_about_chosen(self) -> list[Claim]:
        return about(self.claims.tested, self.chosen)

    def document(self, judged: Sequence[Judged], *, drawing: bool, evidence: Evidence | None = None) -> str:
        """The whole document, whatever was chosen to run: it shows all results there are."""
        places = self.places
        document = Document(
            evidence or self.evidence(),
            judged,
            self.claims.untested,
            places.out,
            places.document.parent / "figures" if drawing and not self.quick else None,
            self.quick,
            self.words,
        )
        return document.fill(QUICK_TEMPLATE if self.quick else template_of(self.folder))

    def check_template(self) -> None:
        """Whether the document can be written, found out before anything is run for it."""
        nothing = Evidence(self.experiments, [])
        try:
            self.document([], drawing=False, evidence=nothing)
        except AlassoError as error:
            raise AlassoError(f"{self.folder / 'document.md'}: {error}") from error

    def refuse_to_write_over_itself(self) -> None:
        if self.places.document.resolve() == (self.folder / "document.md").resolve():
            raise AlassoError(f"{self.places.document} is the study's own template; name another file with --document")

    def page(self, judged: Sequence[Judged]) -> str | None:
        """The verdicts, and the report of all results in the folder; None where there are none."""
        from alasso.bench.report import page
        from alasso.bench.report.load import collect

        if not self.places.out.is_dir():
            return None
        found = collect([self.places.out])
        verdicts = show.for_page(judged, self.words, quick=self.quick)
        return page.build(found, claims=verdicts) if found.results or found.probes else None


def _within(claim: Claim, experiments: Mapping[str, Experiment]) -> bool:
    return all(reference.partition("/")[0] in experiments for reference in claim.references)
