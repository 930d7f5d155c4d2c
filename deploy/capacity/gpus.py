"""The GPUs that are known by name.

Figures are the vendor's: memory, its bandwidth, and dense peak rates. Sheets that print rates "with sparsity" are
halved. fp8 is with accumulation in fp32. Sources, all by NVIDIA:

- A10: "NVIDIA A10 Tensor Core GPU", data sheet; A10G, of AWS's G5: "NVIDIA A10G", data sheet. A40: "NVIDIA A40",
  data sheet.
- A30: "NVIDIA A30 Tensor Core GPU", data sheet.
- A100-40GB, A100-40GB-PCIe, A100-80GB, A100-80GB-PCIe: "NVIDIA A100 Tensor Core GPU", data sheet (columns SXM and
  PCIe), of 40 GB its first edition.
- L4: "NVIDIA L4 Tensor Core GPU", data sheet. L40, L40S: data sheets "NVIDIA L40" and "NVIDIA L40S".
- H100, H100-NVL: "NVIDIA H100 Tensor Core GPU", data sheet (columns SXM and NVL); H100-PCIe: the same, first edition.
- H200, H200-NVL: "NVIDIA H200 Tensor Core GPU", data sheet.
- GH200, GH200-144GB: "NVIDIA GH200 Grace Hopper Superchip", data sheet (HBM3 and HBM3e),
  one to a host.
- B200: "NVIDIA Blackwell", data sheet, HGX B200, per GPU.
- B300: "NVIDIA HGX B300", data sheet, an eighth of the board. Of this one the 288 GB are 10^9 bytes each, 268 GiB.
- GB200, GB300: "NVIDIA GB200 NVL72" and "NVIDIA GB300 NVL72", data sheets, a 72nd of the rack. CUDA reports of a B200
  7,680 lines at 3,996 MHz, 7.67 TB/s (pytorch/ao, pull request 4002).
- RTX-PRO-6000: "NVIDIA RTX PRO 6000 Blackwell Server Edition", data sheet; RTX-PRO-6000-WS: "... Workstation Edition"
  with "NVIDIA RTX Blackwell PRO GPU Architecture", white paper, appendix.
- RTX-3090: "NVIDIA Ampere GA102 GPU Architecture", white paper, appendix. RTX-4090: "NVIDIA Ada GPU Architecture",
  white paper, appendix A. RTX-5090: "NVIDIA RTX Blackwell GPU Architecture", white paper, appendix A.
- RTX-A6000, RTX-6000-Ada: data sheets "NVIDIA RTX A6000" and "NVIDIA RTX 6000 Ada Generation".

What joins them is on the same sheets; see `deploy.capacity.links`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deploy.capacity.links import (
    BRIDGE_OF_A100,
    BRIDGE_OF_H100,
    BRIDGE_OF_H200,
    NETWORK,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    NVLINK_5_RACK,
    PCIE_4,
    PCIE_5,
    Link,
)
from deploy.cli.terminal import GIB
from engine.errors import ConfigError

# What CUDA reports is less than the sheet's figure, which is in GiB whatever it says: 139.8 GiB of an H200's 141,
# 79.2 of an H100's 80, 44.5 of an L40S's 48 (whose GDDR gives a sixteenth to error correction), 178.4 of a B200's.
# Error correction is counted where cards come with it on; an RTX-A6000 comes with it off, and shows 47.5 of its 48.
# GDDR7 has bits of its own for it: an RTX-PRO-6000 shows 95.0 to 95.6 of its 96.
REPORTED = 0.99
WITH_ECC = 15 / 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, in the units of data sheets.

    memory: GB. bandwidth: GB/s. fp32, bf16, fp8: dense TFLOP/s of matrix products (fp32 without TF32; fp16 is as fast
    as bf16); fp8 None = it has none. link: what joins several of one host. ecc_in_memory: whether error correction
    takes its bits from the memory.
    """

    name: str
    memory: float
    bandwidth: float
    fp32: float
    bf16: float
    fp8: float | None = None
    link: Link = PCIE_4
    ecc_in_memory: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes that CUDA reports, within 1 % of those seen."""
        return int(self.memory * GIB * REPORTED * (WITH_ECC if self.ecc_in_memory else 1.0))

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of the memory."""
        return self.bandwidth * 1e9

    def on_nodes(self, gpus: int | None) -> Gpu:
        """Return this GPU in nodes of so many; None = as many as the vendor's own boards have."""
        return self if gpus is None else replace(self, link=self.link.within_nodes(gpus))

    def flops(self, dtype: str) -> float:
        """Return operations a second in a dtype of the engine, or "fp8".

        Raises `ConfigError` where it has no units for fp8.
        """
        if dtype != "fp8":
            return (self.fp32 if dtype == "float32" else self.bf16) * 1e12
        if self.fp8 is None:
            raise ConfigError(f"quantization=fp8: a {self.name} has no units for fp8; use int8", "quantization")
        return self.fp8 * 1e12


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("RTX-3090", 24, 936, 35.6, 71),
        Gpu("RTX-4090", 24, 1008, 82.6, 165.2, 330.3),
        Gpu("RTX-5090", 32, 1792, 104.8, 209.5, 419, PCIE_5),
        Gpu("RTX-A6000", 48, 768, 38.7, 154.8),
        Gpu("RTX-6000-Ada", 48, 960, 91.1, 364.2, 728.5, ecc_in_memory=True),
        Gpu("RTX-PRO-6000", 96, 1597, 120, 500, 1000, PCIE_5),
        Gpu("RTX-PRO-6000-WS", 96, 1792, 126, 503.8, 1007.6, PCIE_5),
        Gpu("L4", 24, 300, 30.3, 121, 242.5, ecc_in_memory=True),
        Gpu("A10", 24, 600, 31.2, 125, ecc_in_memory=True),
        Gpu("A10G", 24, 600, 31.5, 70, ecc_in_memory=True),
        Gpu("A40", 48, 696, 37.4, 149.7, ecc_in_memory=True),
        Gpu("L40", 48, 864, 90.5, 181, 362, ecc_in_memory=True),
        Gpu("L40S", 48, 864, 91.6, 362, 733, ecc_in_memory=True),
        Gpu("A30", 24, 933, 10.3, 165),
        Gpu("A100-40GB", 40, 1555, 19.5, 312, link=NVLINK_3),
        Gpu("A100-40GB-PCIe", 40, 1555, 19.5, 312, link=BRIDGE_OF_A100),
        Gpu("A100-80GB", 80, 2039, 19.5, 312, link=NVLINK_3),
        Gpu("A100-80GB-PCIe", 80, 1935, 19.5, 312, link=BRIDGE_OF_A100),
        Gpu("H100-PCIe", 80, 2000, 51, 756.5, 1513, BRIDGE_OF_H100),
        Gpu("H100", 80, 3350, 67, 989.5, 1979, NVLINK_4),
        Gpu("H100-NVL", 94, 3900, 60, 835.5, 1670.5, BRIDGE_OF_H100),
        Gpu("H200", 141, 4800, 67, 989.5, 1979, NVLINK_4),
        Gpu("H200-NVL", 141, 4800, 60, 835.5, 1670.5, BRIDGE_OF_H200),
        Gpu("GH200", 96, 4000, 67, 989.5, 1979, NETWORK),
        Gpu("GH200-144GB", 144, 4900, 67, 989.5, 1979, NETWORK),
        Gpu("B200", 180, 7700, 75, 2250, 4500, NVLINK_5),
        Gpu("B300", 268, 8000, 75, 2250, 4500, NVLINK_5),
        Gpu("GB200", 186, 8000, 80, 2500, 5000, NVLINK_5_RACK),
        Gpu("GB300", 279, 8000, 80, 2500, 5000, NVLINK_5_RACK),
    )
}
# Names under which one of them goes as well, in capitals: people's, and those of `nvidia-smi`, with which nodes are
# labelled (nvidia.com/gpu.product).
ALIASES: Mapping[str, str] = {
    "A100": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-PCIE-40GB": "A100-40GB-PCIe",
    "A100-SXM4-80GB": "A100-80GB",
    "H100-SXM": "H100",
    "H100-80GB": "H100",
    "H100-80GB-HBM3": "H100",
    "H200-SXM": "H200",
    "A6000": "RTX-A6000",
    "RTX-6000-ADA-GENERATION": "RTX-6000-Ada",
    "GH200-480GB": "GH200",
    "GH200-96GB": "GH200",
    "GH200-144G-HBM3E": "GH200-144GB",
    "B300-SXM6-AC": "B300",
    "RTX-PRO-6000-BLACKWELL": "RTX-PRO-6000",
    "RTX-PRO-6000-BLACKWELL-SERVER-EDITION": "RTX-PRO-6000",
    "RTX-PRO-6000-BLACKWELL-WORKSTATION-EDITION": "RTX-PRO-6000-WS",
}


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, whatever its case. Raises `ConfigError` with the nearest name, or all of them."""
    plain = {key.upper(): gpu for key, gpu in GPUS.items()}
    plain |= {alias: GPUS[target] for alias, target in ALIASES.items()}
    key = name.upper().replace(" ", "-").replace("_", "-").removeprefix("NVIDIA-").removeprefix("GEFORCE-")
    if key in plain:
        return plain[key]
    near = difflib.get_close_matches(key, plain, n=1, cutoff=0.75)
    hint = f"did you mean {plain[near[0]].name}?" if near else "known: " + ", ".join(GPUS)
    raise ConfigError(f"gpu: {name!r} is not known; {hint}", "gpu")
