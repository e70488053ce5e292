"""Compare our peers with their authors' code on the same features: `python scripts/fidelity.py FOLDER`.

FOLDER has a copy of each repository, as OWNER+NAME. This script has none of their code: it loads their files, puts
stand-ins in the place of what they import and we do not have (CLIP, a GPU, mmcv, wandb), and calls their functions
with features. Copies for a GPU stay where they are, and half precision stays single. The rows are those of
`docs/results/fidelity.md`.
"""

import argparse
import builtins
import contextlib
import io
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr

from protodcs import methods
from protodcs.bench import feature_pack
from protodcs.core.decision import Decisions
from protodcs.metrics import auroc

SCALE = 100.0
SAMPLES = 2000
# Samples of the comparisons whose code takes long for each batch.
ONE_BY_ONE, WITH_PROXIES = 200, 600
NOISE_IMAGES = 15
VOCABULARY = "clip_vitb32_negatives.safetensors"


# Stand-ins.


class Anything:
    """Whatever a file imports and the functions that we call do not need. As a decorator it changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Return what is decorated, or anything."""
        return given[0] if len(given) == 1 and not options and callable(given[0]) else Anything()


class Base(torch.nn.Module):
    """A base class that keeps the configuration."""

    def __init__(self, config: Any = None, *given: Any, **options: Any):
        super().__init__()
        self.config = config


def loaded(file: Path, given: dict[str, Any] | None = None, changes: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the names that a file defines. `given` replaces what it imports, `changes` words of its text."""
    given = given or {}
    text = file.read_text().replace("\r", "")
    for before, after in (changes or {}).items():
        assert before in text, before
        text = text.replace(before, after)

    def imported(name: str, *rest: Any) -> Any:
        if len(rest) < 4 or rest[3] == 0:
            with contextlib.suppress(ImportError):
                return original(name, *rest)
        # A star takes nothing: what is needed of such a module comes from `given`.
        return Stand(given)

    original, names = builtins.__import__, {**vars(builtins), "__import__": imported}
    space = {"__name__": file.stem, "__builtins__": names, **given}
    exec(compile(text, str(file), "exec"), space)
    space.update(given)
    return space


class Stand(Anything):
    """A module that is not there."""

    __all__: tuple[str, ...] = ()

    def __init__(self, given: dict[str, Any]):
        self.__dict__.update(given)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Copies to a GPU and to half precision do nothing; nothing is printed."""
    tensor = torch.Tensor
    kept = {name: getattr(tensor, name) for name in ("cuda", "half", "to")}
    available = torch.cuda.is_available

    def to(self: Any, *given: Any, **options: Any) -> Any:
        given = tuple(one for one in given if not str(one).startswith("cuda"))
        return kept["to"](self, *given, **options) if given or options else self

    for name, function in {"cuda": lambda self, *_: self, "half": lambda self: self.float(), "to": to}.items():
        setattr(tensor, name, function)
    torch.cuda.is_available = lambda: False
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.cuda.is_available = available
        for name, function in kept.items():
            setattr(tensor, name, function)


# Streams and rows.


class Stream(NamedTuple):
    """A stream of the feature pack, and the names of the vocabulary."""

    name: str
    prototypes: Any
    features: Any
    labels: Any
    vocabulary: Any


def stream_of(name: str, share: str | None) -> Stream:
    """Return a stream of the split "tune"."""
    packed = feature_pack.stream(name, 0, "tune", share)
    features, labels = packed.features[:SAMPLES], packed.labels[:SAMPLES]
    return Stream(name, packed.prototypes, features, labels, feature_pack.vocabulary(VOCABULARY))


class Theirs(NamedTuple):
    """What the authors' code gives: scores, and where it decides, whether known, and the class."""

    score: Any
    known: Any = None
    index: Any = None


def ours(stream: Stream, name: str, **options: Any) -> tuple[Decisions, Any]:
    """Return the decisions of our method, and its engine."""
    vocabulary = stream.vocabulary if methods.REGISTER[name].uses_vocabulary else None
    engine = methods.create(name, stream.prototypes, vocabulary=vocabulary, **options)
    return engine.observe_many(stream.features), engine


def row(label: str, setting: str, stream: Stream, mine: Decisions, other: Theirs, score: Any = None) -> None:
    """Print what two codes say about the same samples."""
    first = np.asarray(mine.score if score is None else score, dtype=float)
    second = np.asarray(other.score, dtype=float)
    known = stream.labels[: len(second)] >= 0
    first = first[: len(second)]
    cells = [label, setting, stream.name, str(len(second))]
    cells += [f"{np.abs(first - second).max():.1e}", f"{spearmanr(first, second).statistic:.4f}"]
    cells += [f"{100 * auroc(values[known], values[~known]):.2f}" for values in (first, second)]
    for got, want in ((mine.known, other.known), (mine.index, other.index)):
        cells.append("" if want is None else f"{100 * (got[: len(second)] == np.asarray(want)).mean():.1f} %")
    print("| " + " | ".join(cells) + " |", flush=True)


def tensor(rows: Any) -> Any:
    """Return rows as a tensor of single precision."""
    return torch.tensor(np.ascontiguousarray(rows), dtype=torch.float32)


class Features(torch.nn.Module):
    """An encoder whose images are features already."""

    dtype = torch.float32

    def encode_image(self, images: Any) -> Any:
        """Return the features."""
        return images

    def image_encoder(self, images: Any) -> tuple[Any, Any]:
        """Return the features, and none of parts of images."""
        return images, None


# The comparisons, one for each method.


def neglabel(folder: Path, stream: Stream) -> None:
    """The choice of names by its constructor, and the score of its groups."""
    os.environ["LOCAL_RANK"] = "0"
    mine, engine = ours(stream, "neglabel")
    rows = np.concatenate([stream.prototypes, stream.vocabulary.rows])
    classes = [str(i) for i in range(len(stream.prototypes))]
    model = SimpleNamespace(encode_text=lambda ids: tensor(rows[ids.numpy().ravel()]), eval=lambda: None)
    # A name is the number of its row, and its token is that number.
    clip = SimpleNamespace(
        load=lambda *_, **__: (model, None), tokenize=lambda text: torch.tensor([[int(re.sub(r"\D", "", text))]])
    )
    given = {
        "clip": clip, "CLASS_NAME": {"pack": classes}, "prompt_templates": ["{}"], "BaseClassifier": Base,
        "BaseModule": Base,
    }  # fmt: skip
    with on_cpu(), tempfile.TemporaryDirectory() as words:
        chooser = loaded(folder / "XueJiang16+NegLabel/mmcls/models/classifiers/multi_modal.py", given)
        # It needs an adjective. Of one it chooses 15 %, which is none.
        Path(words, "adj.txt").write_text("0\n")
        Path(words, "noun.txt").write_text("\n".join(str(i) for i in range(len(classes), len(rows))))
        chosen = chooser["CLIPScalableClassifier"](
            train_dataset="pack", wordnet_database=words, neg_topk=0.15, prompt_idx_pos=0, prompt_idx_neg=0,
            pencentile=0.95,
        )  # fmt: skip
    theirs = chosen.text_features_neg.numpy()
    common = int(((theirs @ engine._negatives.T).max(1) > 1.0 - 1e-6).sum())
    counts = f"{len(theirs)} names, ours {len(engine._negatives)}, {common} of them common"
    print(f"<!-- NegLabel on {stream.name}: {counts} -->")
    known = SCALE * tensor(stream.features) @ tensor(stream.prototypes).T
    negative = SCALE * tensor(stream.features) @ tensor(engine._negatives).T
    groups = max(1, len(engine._negatives) // 100)
    size = len(engine._negatives) // groups
    order = torch.arange(size * groups).reshape(size, groups).T.reshape(-1)
    for label, name in (("NegLabel", "XueJiang16+NegLabel"), ("CSP", "MengyuanChen21+NeurIPS2024-CSP")):
        space = loaded(folder / name / "mmcls/models/ood/clip_ood.py", given)
        scorer = object.__new__(space["ScalableClassifier"])
        torch.nn.Module.__init__(scorer)
        scorer.t, scorer.local_rank = 1, "0"
        for setting, permutation in (("same groups", lambda *_, **__: order), ("its groups", None)):
            with on_cpu(), patched(torch, "randperm", permutation or own_randperm):
                score = scorer.grouping(known, negative, None, groups, True).numpy()
            row(label, setting, stream, mine, Theirs(score))


_randperm = torch.randperm


def own_randperm(count: int, device: Any = None) -> Any:
    """Return a random permutation, on whatever device."""
    return _randperm(count)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class EnoughError(Exception):
    """The scores are there; the rest of a script is not needed."""


def oodd(folder: Path, stream: Stream) -> None:
    """The whole of its script, with scores and features in its cache files."""
    cosines = stream.features.astype(float) @ stream.prototypes.T.astype(float)
    mcm = (1.0 / np.exp(cosines - cosines.max(1, keepdims=True)).sum(1)).astype(np.float64)
    known, count = stream.labels >= 0, len(mcm)
    arguments = SimpleNamespace(in_dataset="ImageNet", score="MCM", root_dir=".", seed=0, gpu=0)
    shuffled = np.random.RandomState(110).permutation(count)
    # The script puts known before unknown samples and shuffles; ours sees the samples in the order of its shuffle.
    joined = np.concatenate([np.flatnonzero(known), np.flatnonzero(~known)])[shuffled]
    same = stream._replace(features=stream.features[joined], labels=stream.labels[joined])
    for batch, queue in ((1, 128), (64, 128), (64, 2048)):
        got: dict[str, Any] = {}

        def plot(args: Any, inside: Any, outside: Any, name: str, got: dict[str, Any] = got) -> None:
            got["known"], got["unknown"] = -inside, -outside
            raise EnoughError

        changes = {"batch_size = 64": f"batch_size = {batch}", "queue_size =2048": f"queue_size = {queue}"}
        given = {
            "setup_seed": Anything(), "get_num_cls": Anything(), "get_test_labels": Anything(),
            "set_model_clip": lambda *_: (Anything(), Anything()), "set_val_loader": Anything(),
            "set_ood_loader_ImageNet": Anything(), "plot_distribution": plot, "process_args": lambda: arguments,
            "get_and_print_results": Anything(), "print_measures": Anything(), "tqdm": lambda items, **_: items,
        }  # fmt: skip
        space = loaded(folder / "zxk1212+OODD/MCM/eval_ood_detection.py", given, changes)
        kth = space["kth_largest_per_column"]
        space["kth_largest_per_column"] = lambda matrix, k, kth=kth: kth(matrix, min(k, len(matrix)))
        with (
            tempfile.TemporaryDirectory() as place,
            contextlib.chdir(place),
            on_cpu(),
            contextlib.suppress(EnoughError),
        ):
            Path("cache").mkdir()
            for name, rows in (("id", known), ("iNaturalist_id", ~known)):
                np.save(f"cache/{name}.npy", -mcm[rows])
                np.save(f"cache/{name}_feat.npy", stream.features[rows])
            with patched(torch.cuda, "set_device", lambda *_: None):
                torch.cuda.is_available = CudaOnce()
                space["main"]()
        inside = same.labels >= 0
        score = np.empty(count)
        score[inside], score[~inside] = got["known"], got["unknown"]
        mine, _ = ours(same, "oodd", queue=queue)
        row("OODD", f"queue {queue}, batches of {batch}", same, mine, Theirs(score))


class CudaOnce:
    """A GPU for the assertion at the start of a script, and none afterwards."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> bool:
        """Say whether this is the first time."""
        self.asked += 1
        return self.asked == 1


def dcac(folder: Path, stream: Stream) -> None:
    """Its test loop for MCM. Beside each sample comes a class text, because the loop needs two, and takes no part."""
    top, shots, alpha, threshold = 5, 20, 0.25, 0.25
    got: dict[str, Any] = {}

    def measures(known: Any, unknown: Any, *_: Any) -> tuple[float, float, float]:
        got["known"], got["unknown"] = known, unknown
        return 0.0, 0.0, 0.0

    helpers = loaded(folder / "wyqstan+DCAC/VLM/methods/utils.py")
    given = {name: helpers[name] for name in ("update_cache", "compute_cache_logits")}
    given |= {"get_measures": measures, "tqdm": lambda items: items}
    space = loaded(folder / "wyqstan+DCAC/VLM/methods/coop_test.py", given)
    config = {"enabled": True, "shot_capacity": shots, "alpha": alpha, "lower": 95, "topk": top}
    text = tensor(stream.prototypes)
    # A text that is sure of its own class: it is never cached.
    sure = text[:1]
    loader = [(torch.cat([tensor(one[None]), sure]), ("OOD", "ID")) for one in stream.features]
    with on_cpu():
        space["run_test_coop"](config, loader, Features(), text, np.array([threshold]))
    mine, _ = ours(stream, "dcac", top=top, shots=shots, alpha=alpha, entropy_threshold=threshold)
    row("DCAC", "alpha 0.25, top 5, entropy above 0.25", stream, mine, Theirs(got["unknown"]))
    mine, _ = ours(stream, "dcac")
    row("DCAC", "ours: entropy quantile of the stream", stream, mine, Theirs(got["unknown"]))


class Net:
    """What a postprocessor of OpenOOD-VLM asks a network for."""

    def __init__(self, stream: Stream, names: Any, with_classes: bool):
        self.n_cls = len(stream.prototypes)
        everything = tensor(np.concatenate([stream.prototypes, names]))
        self.text_features = self.text_features_all = everything.T.contiguous()
        self.cls_text_features = self.text_features[:, : self.n_cls].contiguous()
        # Noise that is uniform over all labels, which is where ours begins.
        self.noise_image_features = torch.zeros(NOISE_IMAGES, everything.shape[1])
        self.logit_scale = torch.tensor(SCALE)
        self.with_classes = with_classes

    def eval(self) -> None:
        """Do nothing: there is nothing to train."""

    def __call__(self, features: Any, return_feat: bool) -> tuple[Any, ...]:
        """Return the features, the texts and the scale of logits."""
        texts = self.text_features.T
        if self.with_classes:
            return features, texts, self.cls_text_features.T, self.logit_scale
        return features, texts, self.logit_scale


def postprocessed(space: dict[str, Any], kind: str, net: Net, features: Any, batch: int, **arguments: Any) -> Any:
    """Return classes and scores of a postprocessor, fed in batches."""
    config = SimpleNamespace(
        postprocessor=SimpleNamespace(postprocessor_args=SimpleNamespace(**arguments), postprocessor_sweep=None)
    )
    with on_cpu(), torch.no_grad():
        torch.manual_seed(0)
        made = space[kind](config)
        parts = [made.postprocess(net, tensor(features[i : i + batch])) for i in range(0, len(features), batch)]
    return tuple(np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(2))


_GROUPS = {"group_num": 5, "group_size": 1000, "tau": 1.0, "cluster_num": 0, "cossim": False}


def adaneg(folder: Path, stream: Stream) -> None:
    """Its postprocessor, `TTAPromptPostprocessor_noadagap`, which its scripts name."""
    file = folder / "YBZh+OpenOOD-VLM/openood/postprocessors/ttaprompt_postprocessor.py"
    space = loaded(file, {"BasePostprocessor": Base, "tqdm": lambda items: items})
    stream = stream._replace(features=stream.features[:WITH_PROXIES], labels=stream.labels[:WITH_PROXIES])
    for proxy in ("sample", "task"):
        mine, engine = ours(stream, "adaneg", proxy=proxy)
        net = Net(stream, engine._negatives, False)
        count = len(engine._negatives) - len(engine._negatives) % 5
        order = torch.arange(count).reshape(-1, 5).T.reshape(-1)
        for setting, batch, permutation in (
            ("same groups, one by one", 1, lambda *_, order=order: order),
            ("its groups, batches of 64", 64, own_randperm),
        ):
            if proxy == "sample" and batch > 1:
                batch, setting = 8, "its groups, batches of 8"
            with patched(torch, "randperm", permutation):
                index, score = postprocessed(
                    space, "TTAPromptPostprocessor_noadagap", net, stream.features, batch, **_GROUPS, beta=5.5,
                    thres=0.5, gap=0.5, memleng=10, lambdaval=0.1, in_score="combine", samada=proxy == "sample",
                    random_permute=True,
                )  # fmt: skip
            row("AdaNeg", f"{proxy} proxies, {setting}", stream, mine, Theirs(score, None, index))


def tanl(folder: Path, stream: Stream) -> None:
    """Its postprocessor, with all names to choose from."""
    file = folder / "YBZh+OpenOOD-VLM/openood/postprocessors/activated_neg_postprocessor.py"
    space = loaded(file, {"BasePostprocessor": Base, "tqdm": lambda items: items})
    mine, engine = ours(stream, "tanl")
    net = Net(stream, engine._negatives, False)
    for batch in (1, 256):
        index, score = postprocessed(
            space, "ActivatedNegPostprocessor", net, stream.features, batch, **_GROUPS, alpha=0.95,
            beta=max(16, net.n_cls), gamma=1, thres=0.5, gap=0.5, memleng=300, in_score="sum", samada=True,
            random_permute=False,
        )  # fmt: skip
        row("TANL", f"batches of {batch}", stream, mine, Theirs(score, None, index))


def dde(folder: Path, stream: Stream) -> None:
    """Its postprocessor. A batch of one takes half a second, so its rows have fewer samples."""
    file = folder / "ZhuWenjie98+OpenOOD-VLM/openood/postprocessors/dde_postprocessor.py"
    space = loaded(file, {"BasePostprocessor": Base, "tqdm": lambda items: items})
    for batch, count, variants in (
        (
            1,
            ONE_BY_ONE,
            {"ours: covariance per class, period 1": {"covariance": "class", "period": 1}, "ours: defaults": {}},
        ),
        (256, SAMPLES, {"ours: defaults": {}}),
    ):
        part = stream._replace(features=stream.features[:count], labels=stream.labels[:count])
        _, engine = ours(part._replace(features=part.features[:1]), "dde")
        index, score = postprocessed(
            space, "DDEPostprocessor", Net(part, engine._negatives, True), part.features, batch, **_GROUPS, alpha=0.005,
            beta=0.0, gamma=1.0, hat_M=max(5, len(part.prototypes) // 2), thres=0.5, gap=0.5, memleng=1000, eta=0.2,
            dota_rho=0.005, neg_topk=1, in_score="sum", samada=True, random_permute=False,
        )  # fmt: skip
        for setting, options in variants.items():
            mine, _ = ours(part, "dde", **options)
            # It writes -1 over the class of a sample that it rejects.
            agreed = np.where(index < 0, mine.index, index)
            row("DDE", f"batches of {batch}; {setting}", part, mine, Theirs(score, index >= 0, agreed))


def cached_logits(space: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Return the final logits of a test loop that passes them to `cls_acc`."""
    found: list[Any] = []
    space["cls_acc"] = lambda logits, target: found.append(logits.detach().numpy().ravel()) or 0.0
    with on_cpu():
        run()
    return np.array(found)


def tda(folder: Path, stream: Stream) -> None:
    """Its test loop, with the settings for ImageNet."""
    helpers = loaded(folder / "kdiAAA+TDA/utils.py")
    given = {name: helpers[name] for name in ("get_clip_logits", "get_entropy", "softmax_entropy")}
    space = loaded(folder / "kdiAAA+TDA/tda_runner.py", given | {"tqdm": lambda items, **_: items, "wandb": Anything()})
    positive = {"enabled": True, "shot_capacity": 3, "alpha": 2.0, "beta": 5.0}
    negative = {
        "enabled": True, "shot_capacity": 2, "alpha": 0.117, "beta": 1.0,
        "entropy_threshold": {"lower": 0.2, "upper": 0.5}, "mask_threshold": {"lower": 0.03, "upper": 1.0},
    }  # fmt: skip
    text = tensor(stream.prototypes).T.contiguous()
    loader = [(tensor(one[None]), torch.zeros(1)) for one in stream.features]
    logits = cached_logits(space, lambda: space["run_test_tda"](positive, negative, loader, Features(), text))
    mine, _ = ours(stream, "tda", entropy_base="published", score="max")
    other = Theirs(logits.max(1) / SCALE, None, logits.argmax(1))
    row("TDA", "settings for ImageNet, entropy by log2", stream, mine, other)


def dpe(folder: Path, stream: Stream) -> None:
    """Its test loop on single views, with the settings for ImageNet."""
    helpers = loaded(folder / "zhangce01+DPE-CLIP/utils.py")
    given = {name: helpers[name] for name in ("get_clip_logits", "get_entropy", "avg_entropy", "softmax_entropy")}

    def contrast(*_: Any, **options: Any) -> Callable[[Any, Any], Any]:
        def loss(first: Any, second: Any) -> Any:
            normal = torch.nn.functional.normalize
            products = normal(first, dim=-1) @ normal(second, dim=-1).T / options["temperature"]
            return torch.nn.functional.cross_entropy(products, torch.arange(len(products)))

        return loss

    given |= {"tqdm": lambda items, **_: items, "wandb": Anything(), "InfoNCE": contrast}
    space = loaded(folder / "zhangce01+DPE-CLIP/main_dpe.py", given)
    positive = {"enabled": True, "shot_capacity": 3, "alpha": 6.0, "beta": 5.0}
    text = tensor(stream.prototypes).T.contiguous()
    loader = [([tensor(one[None])], torch.zeros(1)) for one in stream.features]
    rates = {"text": 6e-4, "image": 6e-4, "align": 0.5}
    logits = cached_logits(space, lambda: space["run_test_dpe"](positive, rates, loader, Features(), text, "I"))
    mine, _ = ours(stream, "dpe")
    other = Theirs(logits.max(1), None, logits.argmax(1))
    row("DPE", "settings for ImageNet, one view", stream, mine, other)


def rosita(folder: Path, stream: Stream) -> None:
    """The gate of its test loop, with its two losses off: they train the image encoder."""
    helpers = loaded(folder / "manogna-s+ROSITA/utils/clip_tta_utils.py")
    given = {name: helpers[name] for name in ("compute_os_variance", "get_ln_params")}
    scores: list[Any] = []

    def curve(known: Any, unknown: Any) -> tuple[float, float]:
        scores.append(np.concatenate([unknown, known]))
        return 0.0, 0.0

    given |= {"cal_auc_fpr": curve, "HM": lambda *_: 0.0, "tqdm": lambda items: items, "METHODS_REGISTRY": Anything()}
    given |= {"accuracy": Anything(), "plt": Anything(), "pd": Anything()}
    space = loaded(folder / "manogna-s+ROSITA/methods/rosita.py", given)
    decided: list[bool] = []

    def loader() -> Iterator[Any]:
        for i, one in enumerate(stream.features):
            if i:
                decided.append(bool(sys._getframe(1).f_locals["W_pred"][0]))
            # The first sample is labelled unknown: the loop divides by the count of such samples.
            yield [tensor(one[None]), tensor(one[None])], torch.full((1,), 0.0 if i else 1000.0)

    class Sized:
        def __len__(self) -> int:
            return len(stream.features)

        def __iter__(self) -> Iterator[Any]:
            return loader()

    with tempfile.TemporaryDirectory() as place, on_cpu():
        arguments = SimpleNamespace(
            tta_method="ROSITA", out_dir=place, model="pack", desired="known", undesired="unknown", N_scores=512,
            N_s=64, classifier_type="txt", tta_lr=0.001, k_p=5, k_n=5, loss_pl=0, loss_simclr=0, alpha=1.0,
        )  # fmt: skip
        space["ROSITA"](arguments, Watched(), Sized(), {"txt": tensor(stream.prototypes)})
    mine, _ = ours(stream, "rosita_gate")
    other = Theirs(scores[0][: len(decided)], decided)
    row("ROSITA", "gate only, losses off", stream, mine, other)


class Watched(Features):
    """The encoder of ROSITA, with a parameter whose name is that of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("image_encoder_ln", torch.nn.Parameter(torch.zeros(1)))


def adand(folder: Path, stream: Stream) -> None:
    """Its detector and its queue, one sample at a time, without noise images and with a head that starts at zero."""
    home = folder / "tmlr-group+ZS-NTTA"
    helper = loaded(home / "utils/utils.py")
    given = {"compute_os_variance": helper["compute_os_variance"]}
    base = loaded(home / "ttda_method/zs_clip.py", given)["ZeroShotCLIP"]
    space = loaded(home / "ttda_method/zs_noisytta.py", given | {"ZeroShotCLIP": base, "OODDetector": Anything()})
    made = object.__new__(space["ZeroShotNTTA"])
    inference = SimpleNamespace(
        batch_size=1, ttda_queue_length=64, queue_length=512, threshold_type="adaptive", using_ttda_step=10
    )
    made.args, made.model = SimpleNamespace(inference=inference), SimpleNamespace(eval=lambda: None)
    head = torch.nn.Linear(stream.features.shape[1], 2)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    made.ood_net, made.criterion = head, torch.nn.CrossEntropyLoss()
    made.optimizer = torch.optim.Adam(head.parameters(), lr=5e-4)
    made.os_detector_queue, made.os_inference_queue, made.loss_history, made.ttda_queue = [], [], [], []
    queues = ("ood_detector_out_queue", "unseen_mask_queue", "target_queue", "clip_output_queue")
    made.queues = {name: deque(maxlen=64) for name in queues}
    scores, known = [], []
    text = tensor(stream.prototypes)
    with on_cpu():
        for step, one in enumerate(stream.features):
            feature = tensor(one[None])
            raw = 10.0 * feature
            with torch.no_grad():
                logit = head(raw)[0]
                scores.append(float(logit[1] - logit[0]) / 2.0)
            said = made.get_unseen_mask(SCALE * feature @ text.T, None, raw, step, torch.zeros(1))
            mask = said[0] if isinstance(said, tuple) else said
            known.append(not bool(mask[0]))
    mine, _ = ours(stream, "adand", noise_period=0)
    row("AdaND", "no noise images", stream, mine, Theirs(scores, known))


METHODS = {
    "neglabel": neglabel, "oodd": oodd, "dcac": dcac, "adaneg": adaneg, "tanl": tanl, "dde": dde, "tda": tda,
    "dpe": dpe, "rosita": rosita, "adand": adand,
}  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="Folder with a copy of each repository, as OWNER+NAME.")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="Methods to compare (default: all).")
    parser.add_argument("--streams", nargs="+", default=["dtd", "sun"], help="Streams (default: dtd sun).")
    parser.add_argument("--share", help="Share of unknown images (default: as the stream has it).")
    given = parser.parse_args()
    torch.set_num_threads(1)
    head = ("method", "setting", "stream", "samples", "largest difference", "Spearman")
    print("| " + " | ".join((*head, "AUROC ours", "AUROC theirs", "same decision", "same class")) + " |")
    print("|---|---|---|" + "---:|" * 7)
    for name in given.streams:
        stream = stream_of(name, given.share)
        for method in given.only or METHODS:
            METHODS[method](given.folder.absolute(), stream)


if __name__ == "__main__":
    main()
