"""Which codes and codebooks R stand for the error that S*T leaves?

`fit_residual_kmeans` spends the codewords on the error of the weights, `fit_residual_activation` on
the error of the layer's outputs, tr((E - R) H (E - R)^T) with H = E[x x^T]. `fit_zero_residual`
gives training something to move where S*T is exact already.

Sub-vectors of full length are clustered. A shorter one at a row's end (in_features not a multiple
of dim) is clustered only if its group has no other, and else takes the codeword whose head fits.

Shapes: O output rows, I input features, S sub-vectors of a row, G groups, K codewords, d = dim,
B groups of a batch, N points of a group, W inputs of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from bonsai_ft.format.packing import GROUP, pack_codes, pack_signs
from bonsai_ft.format.weight import Residual, TernaryWeight
from bonsai_ft.quantize.metric import checked_moment, damped, quadratic, row_slices
from bonsai_ft.quantize.ternary import TernaryFit

__all__ = [
    "ResidualFit",
    "build_weight",
    "fit_residual_activation",
    "fit_residual_kmeans",
    "fit_zero_residual",
    "to_residual",
]

STORAGES = (torch.float16, torch.bfloat16)
# The smallest normal float16. A smaller sigma would be coarse, and a sigma of 0 could not train.
SIGMA_FLOOR = 2.0**-14
# Where the error is 0, codebooks start to move in units of this part of the group's mean scale.
ZERO_SIGMA = 0.05
# 32 MiB of float32 for the points of the groups that are fitted at a time.
BATCH_ELEMENTS = 1 << 23
# Distances of 1 MiB stay in the cache: three times faster than 32 MiB at K = 256.
DISTANCE_ELEMENTS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ResidualFit:
    """Codes int64 [O, S], codebook 16-bit [G, K, d], mu and sigma float16 [G]."""

    codes: Tensor
    codebook: Tensor
    mu: Tensor
    sigma: Tensor

    def dense(self, in_features: int) -> Tensor:
        """R as float32 [O, I]."""
        return to_residual(self).dequantize(in_features)


def to_residual(fit: ResidualFit) -> Residual:
    """The fit with its codes packed."""
    codes = pack_codes(fit.codes, fit.codebook.shape[1])
    return Residual(codes=codes, codebook=fit.codebook, mu=fit.mu, sigma=fit.sigma)


def build_weight(fit: TernaryFit, residual: ResidualFit | None, packing: str) -> TernaryWeight:
    """S*T (+ R) as the packed weight of the format."""
    out_features, in_features = fit.signs.shape
    return TernaryWeight(
        out_features=out_features,
        in_features=in_features,
        packing=packing,
        ternary=pack_signs(fit.signs, packing),
        scale=fit.scale,
        residual=None if residual is None else to_residual(residual),
    )


def fit_residual_kmeans(
    error: Tensor,
    *,
    dim: int = 128,
    k: int = 4,
    iterations: int = 25,
    seed: int = 0,
    storage: torch.dtype = torch.float16,
) -> ResidualFit:
    """Plain k-means of the z-scored error [O, I], one codebook per group; deterministic by `seed`.

    mu and sigma are rounded before the z-score uses them, and the codes are assigned against the
    rounded codebook, so that what is fitted is what is stored.
    """
    _check_error(error)
    _check_codec(dim, k, storage)
    out_features, in_features = error.shape
    mu, sigma = _group_moments(error)
    groups, per_group = len(mu), GROUP // dim
    uniforms = _uniforms((groups, k), seed, error)
    codebook = torch.zeros(groups, k, dim, dtype=storage, device=error.device)
    codes = torch.empty(out_features, math.ceil(in_features / dim), dtype=torch.long)
    codes = codes.to(error.device)
    for batch, columns in _group_batches(out_features, in_features):
        block = error[:, columns].detach().float().view(out_features, batch.stop - batch.start, -1)
        z = (block - mu[batch].float()[:, None]) / sigma[batch].float()[:, None]
        points, tail = _sub_vectors(z, dim)
        length = points.shape[2]
        centroids = _fit_centroids(points, uniforms[batch], iterations)
        codebook[batch, :, :length] = centroids.to(storage)
        stored = codebook[batch, :, :length].float()
        # [B, O*n] -> [O, B*n]
        nearest = _nearest(points, stored)[0].view(len(points), out_features, -1)
        found = nearest.transpose(0, 1).flatten(1)
        if tail is not None:
            last = _nearest(tail, stored[:, :, : tail.shape[2]])[0]
            found = torch.cat([found, last.view(out_features, 1)], dim=1)
        first = batch.start * per_group
        codes[:, first : first + found.shape[1]] = found
    return ResidualFit(codes=codes, codebook=codebook, mu=mu, sigma=sigma)


def fit_residual_activation(
    error: Tensor,
    *,
    second_moment: Tensor,
    dim: int = 128,
    k: int = 4,
    sweeps: int = 2,
    iterations: int = 15,
    damping: float = 0.01,
    seed: int = 0,
    storage: torch.dtype = torch.float16,
) -> ResidualFit:
    """R that minimises tr((E - R) H (E - R)^T), the error of the layer's outputs.

    Block coordinate descent over groups, H damped by `damping` times its mean diagonal. With
    D = E - R and every other sub-vector fixed, the best R of a row's sub-vector s is
    t = R_s + (D H)_s H_ss^-1, and codeword c costs (t - c) H_ss (t - c)^T more: whiten with the
    Cholesky factor of H_ss, run k-means there, map back. A later sweep starts from present codes.

    For dim < 128 the sub-vectors of a group share a codebook but not a metric. They are clustered
    in the mean of their metrics, then take their codes one after the other, each in its own.

    Never worse on the given H than `fit_residual_kmeans`: the better of the two comes back.
    """
    _check_error(error)
    _check_codec(dim, k, storage)
    if damping < 0 or sweeps < 1:
        raise ValueError(f"damping={damping} must be >= 0 and sweeps={sweeps} at least 1")
    h = checked_moment(second_moment, error)
    plain = fit_residual_kmeans(error, dim=dim, k=k, seed=seed, storage=storage)
    metric = damped(h, damping)
    uniforms = _uniforms((len(plain.mu), k), seed, error)
    in_features, per_group = error.shape[1], GROUP // dim
    codes, codebook = torch.zeros_like(plain.codes), torch.zeros_like(plain.codebook)
    difference = error.detach().float().clone()
    residual = torch.zeros_like(difference)
    for sweep in range(sweeps):
        for group in range(len(plain.mu)):
            inputs = slice(group * GROUP, min((group + 1) * GROUP, in_features))
            subs = slice(group * per_group, (group + 1) * per_group)
            problem = _GroupProblem(
                present=residual[:, inputs],
                product=difference @ metric[:, inputs],
                metric=metric[inputs, inputs],
                mu=plain.mu[group : group + 1],
                sigma=plain.sigma[group : group + 1],
            )
            centroids = _cluster_targets(
                problem, dim, uniforms[group], iterations, codes[:, subs] if sweep else None
            )
            stored = _stored_codebook(problem, centroids, dim, storage)
            found, chosen, change = _assign_in_turn(problem, stored)
            if sweep and change >= 0:
                continue
            codes[:, subs], codebook[group] = found, stored
            difference[:, inputs] += residual[:, inputs] - chosen
            residual[:, inputs] = chosen
    fit = replace(plain, codes=codes, codebook=codebook)
    better = _objective(error, fit, h) <= _objective(error, plain, h)
    return fit if better else plain


def fit_zero_residual(
    scale: Tensor,
    in_features: int,
    out_features: int,
    dim: int = 128,
    k: int = 4,
    seed: int = 0,
    storage: torch.dtype = torch.float16,
) -> ResidualFit:
    """R = 0 that training can move: codebook and mu are 0, sigma is not, codes are spread evenly.

    Codes are a seeded, balanced random assignment, so that codewords see different rows and
    differentiate. `scale` is [O, G] or [O, 1].
    """
    _check_codec(dim, k, storage)
    groups = math.ceil(in_features / GROUP)
    if scale.shape not in {(out_features, groups), (out_features, 1)}:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; a weight [{out_features}, {in_features}] "
            f"has scales [{out_features}, {groups}] or [{out_features}, 1]"
        )
    sigma = (ZERO_SIGMA * scale.double().mean(0)).clamp_min(SIGMA_FLOOR).to(torch.float16)
    order = _uniforms((out_features, math.ceil(in_features / dim)), seed, scale).argsort(dim=0)
    return ResidualFit(
        codes=order % k,
        codebook=torch.zeros(groups, k, dim, dtype=storage, device=scale.device),
        mu=torch.zeros(groups, dtype=torch.float16, device=scale.device),
        sigma=sigma.expand(groups).clone(),
    )


# k-means, batched over groups


def _fit_centroids(
    points: Tensor, uniforms: Tensor, iterations: int, start: Tensor | None = None
) -> Tensor:
    """Lloyd's centroids [B, K, d] of points [B, N, d], from codes `start` [B, N] or k-means++."""
    k = uniforms.shape[1]
    if start is not None:
        centroids = _means(points, start, k)[0]
    else:
        centroids = _seed_centroids(points, uniforms)
    previous: Tensor | None = None
    for _ in range(iterations):
        codes, score = _nearest(points, centroids)
        if previous is not None and torch.equal(codes, previous):
            break
        previous = codes
        centroids, count = _means(points, codes, k)
        is_empty = count == 0
        if bool(is_empty.any()):
            served = score + points.square().sum(2)
            worst = served.topk(min(k, points.shape[1]), dim=1).indices
            # The n-th empty cluster of a group takes the n-th worst served point.
            turn = (is_empty.cumsum(1) - 1).clamp(0, worst.shape[1] - 1)
            rescued = _take(points, worst.gather(1, turn))
            centroids = torch.where(is_empty.unsqueeze(2), rescued, centroids)
    return centroids


def _seed_centroids(points: Tensor, uniforms: Tensor) -> Tensor:
    """k-means++: each next centroid is a point drawn by its squared distance to those before."""
    num_points = points.shape[1]
    first = (uniforms[:, :1] * num_points).long().clamp_max(num_points - 1)
    centroids = [_take(points, first)]
    distance = (points - centroids[0]).square().sum(2)
    for step in range(1, uniforms.shape[1]):
        mass = distance.double().cumsum(1)
        drawn = torch.searchsorted(mass, uniforms[:, step : step + 1] * mass[:, -1:], right=True)
        centroids.append(_take(points, drawn.clamp_max(num_points - 1)))
        distance = torch.minimum(distance, (points - centroids[-1]).square().sum(2))
    return torch.cat(centroids, dim=1)


def _nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [B, N] of the nearest centroids, and squared distance less the point's own square."""
    codes, scores = [], []
    norms = centroids.square().sum(2).unsqueeze(1)
    for part in points.split(_point_step(centroids), dim=1):
        score, code = (norms - 2 * part @ centroids.transpose(1, 2)).min(dim=2)
        codes.append(code)
        scores.append(score)
    return torch.cat(codes, dim=1), torch.cat(scores, dim=1)


def _means(points: Tensor, codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mean [B, K, d] and number [B, K] of the points of each cluster; an empty one has mean 0.

    One-hot products: reproducible on every device, and faster than scattered additions.
    """
    sums = points.new_zeros(len(points), k, points.shape[2])
    count = points.new_zeros(len(points), k)
    step = _point_step(sums)
    for part, code in zip(points.split(step, dim=1), codes.split(step, dim=1), strict=True):
        one_hot = part.new_zeros(*code.shape, k).scatter_(2, code.unsqueeze(2), 1.0)
        sums += one_hot.transpose(1, 2) @ part
        count += one_hot.sum(1)
    return sums / count.clamp_min(1).unsqueeze(2), count


def _take(points: Tensor, index: Tensor) -> Tensor:
    """Points [B, n, d] at index [B, n]."""
    return points.gather(1, index.unsqueeze(2).expand(-1, -1, points.shape[2]))


def _point_step(centroids: Tensor) -> int:
    """How many points of every group have their distances in memory at once."""
    return max(1, DISTANCE_ELEMENTS // (centroids.shape[0] * centroids.shape[1]))


# Output-aware fit of one group


@dataclass(frozen=True, kw_only=True)
class _GroupProblem:
    """R_g as it is [O, W], (D H)_g [O, W], H_gg [W, W], and the group's mu and sigma [1]."""

    present: Tensor
    product: Tensor
    metric: Tensor
    mu: Tensor
    sigma: Tensor


def _cluster_targets(
    problem: _GroupProblem, dim: int, uniforms: Tensor, iterations: int, codes: Tensor | None
) -> Tensor:
    """Codewords [K, min(d, W)] that serve the targets of the group's full sub-vectors."""
    out_features, width = problem.present.shape
    length = min(dim, width)
    num = width // length
    # [n, O, d] and [n, d, d]
    present = _stacked(problem.present, length, num)
    product = _stacked(problem.product, length, num)
    blocks = problem.metric[: num * length, : num * length].view(num, length, num, length)
    metrics = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
    factors = torch.linalg.cholesky(metrics)
    step = torch.cholesky_solve(product.double().transpose(1, 2), factors).transpose(1, 2)
    targets = present.double() + step
    common = torch.linalg.cholesky(metrics.mean(0))
    points = (targets @ common).float().view(1, num * out_features, length)
    start = None if codes is None else codes[:, :num].T.reshape(1, -1)
    centroids = _fit_centroids(points, uniforms.unsqueeze(0), iterations, start)[0].double()
    return torch.linalg.solve_triangular(common, centroids, upper=False, left=False)


def _stored_codebook(
    problem: _GroupProblem, codewords: Tensor, dim: int, storage: torch.dtype
) -> Tensor:
    """Codewords as they are stored, [K, d]: z-scored, rounded, 0 where no input can reach."""
    z = (codewords - problem.mu.double()) / problem.sigma.double()
    limit = torch.finfo(storage).max
    return F.pad(z.clamp(-limit, limit).to(storage), (0, dim - z.shape[1]))


def _assign_in_turn(problem: _GroupProblem, stored: Tensor) -> tuple[Tensor, Tensor, float]:
    """Codes [O, s], R_g [O, W] and the change of the objective, sub-vector after sub-vector."""
    width, dim = problem.present.shape[1], stored.shape[1]
    codewords = problem.mu.float() + problem.sigma.float() * stored.float()
    product, chosen, codes = problem.product.clone(), problem.present.clone(), []
    for start in range(0, width, dim):
        part = slice(start, min(start + dim, width))
        options, metric = codewords[:, : part.stop - start], problem.metric[part, part]
        linear = chosen[:, part] @ metric + product[:, part]
        score = ((options @ metric) * options).sum(1) - 2 * linear @ options.T
        code = score.argmin(1)
        moved = options[code] - chosen[:, part]
        product -= moved @ problem.metric[part]
        chosen[:, part] = options[code]
        codes.append(code)
    total = (problem.product + product) * (chosen - problem.present)
    return torch.stack(codes, dim=1), chosen, -float(total.sum(dtype=torch.float64))


def _stacked(block: Tensor, length: int, num: int) -> Tensor:
    """[O, W] -> [n, O, d], full sub-vectors only."""
    return block[:, : num * length].view(len(block), num, length).transpose(0, 1)


def _objective(error: Tensor, fit: ResidualFit, h: Tensor) -> float:
    residual = fit.dense(error.shape[1])
    return sum(quadratic(error[rows].float() - residual[rows], h) for rows in row_slices(error))


# Groups and their numbers


def _group_moments(error: Tensor) -> tuple[Tensor, Tensor]:
    """mu and sigma, float16 [G]: mean and population std of the groups' errors."""
    means, stds = [], []
    for block in error.detach().split(GROUP, dim=1):
        values = block.double()
        means.append(values.mean())
        stds.append(values.std(correction=0))
    mu, sigma = torch.stack(means).half(), torch.stack(stds).clamp_min(SIGMA_FLOOR).half()
    if not bool((mu.isfinite() & sigma.isfinite()).all()):
        raise ValueError("the error of a group exceeds float16; rescale the weight")
    return mu, sigma


def _group_batches(out_features: int, in_features: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of groups of one width, with their ranges of inputs."""
    full = in_features // GROUP
    step = max(1, BATCH_ELEMENTS // (out_features * GROUP))
    for start in range(0, full, step):
        stop = min(start + step, full)
        yield slice(start, stop), slice(start * GROUP, stop * GROUP)
    if in_features % GROUP:
        yield slice(full, full + 1), slice(full * GROUP, in_features)


def _sub_vectors(z: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Points [B, O*n, min(d, W)] of [O, B, W], and the short sub-vector at the end, if any."""
    out_features, batch, width = z.shape
    length = min(dim, width)
    num = width // length
    points = z[:, :, : num * length].reshape(out_features, batch, num, length).transpose(0, 1)
    tail = z[:, :, num * length :].transpose(0, 1) if width % length else None
    return points.reshape(batch, out_features * num, length), tail


def _uniforms(shape: tuple[int, int], seed: int, like: Tensor) -> Tensor:
    """Drawn on the CPU, so that a seed means the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(like.device)


def _check_codec(dim: int, k: int, storage: torch.dtype) -> None:
    if dim < 1 or GROUP % dim:
        raise ValueError(f"residual_dim={dim} does not divide the group size {GROUP}")
    if not 2 <= k <= 256:
        raise ValueError(f"residual_k={k} is not allowed; give 2 to 256")
    if storage not in STORAGES:
        raise ValueError(f"a codebook cannot be stored as {storage}; use float16 or bfloat16")


def _check_error(error: Tensor) -> None:
    if error.dim() != 2 or error.numel() == 0 or not error.is_floating_point():
        raise ValueError(
            f"error is {error.dtype} of shape {tuple(error.shape)}; "
            "give a non-empty floating point matrix [out_features, in_features]"
        )
    low, high = error.detach().aminmax()
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise ValueError("error holds NaN or infinite values; repair the source checkpoint")
