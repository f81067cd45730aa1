# SPDX-License-Identifier: Apache-2.0
"""The accelerators that Phalanx predicts steps for, with their published figures.

Sources: for TPUs, the book "How to Scale Your Model" (jax-ml/scaling-book, tpus.md, commit 04d8de5); for GPUs, the data sheets of
NVIDIA A100 80GB SXM, H100 SXM and H200 SXM. FLOP/s are those of bfloat16 without sparsity.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Args:
      name: the name in a topology, for example "v5e".
      platform: the platform of JAX that compiles for it.
      memory: bytes of memory.
      memory_bandwidth: bytes per second between memory and chip.
      flops: multiplications and additions per second, in bfloat16.
      link: bytes per second that a chip sends to its neighbours: along one dim of a torus, or to all others in its host.
      network: bytes per second that a chip sends out of its slice or host, as its share of what the host can send.
      per_host: number of chips in a host.
      dims: number of dims of the torus. 0 if the chips of a host reach each other through a switch.
      longest: number of chips from which a dim of the torus is a ring. Shorter dims take twice the time.
      largest: the largest number of chips per dim of a slice.
      target: the text that selects the chip in XLA's GPU compiler. Empty for other platforms.
    """

    name: str
    platform: str
    memory: float
    memory_bandwidth: float
    flops: float
    link: float
    network: float
    per_host: int
    dims: int = 0
    longest: int = 0
    largest: tuple[int, ...] = ()
    target: str = ""


@dataclass(frozen=True)
class _Gpu:
    """The facts of a GPU that XLA's compiler must know.

    Args:
      description: the name that its driver reports.
      major: the first number of its compute capability.
      clock_ghz: clock rate of its cores.
      num_cores: number of streaming multiprocessors.
      units: number of float32 units per core.
      l2: bytes of its second cache.
      shared: bytes of shared memory that a block may use.
    """

    description: str
    major: int
    clock_ghz: float
    num_cores: int = 108
    units: int = 64
    l2: int = 40 << 20
    shared: int = 166912

    def text(self, memory: float, bandwidth: float) -> str:
        """Returns the description in the text format of protocol buffers."""
        # The kilobyte more per core is what CUDA reserves for a block.
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared + 1024}
  shared_memory_per_block_optin: {self.shared}
  threads_per_core_limit: 2048
  core_count: {self.num_cores}
  fpus_per_core: {self.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(bandwidth)}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {int(memory)}
  cuda_compute_capability {{ major: {self.major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{self.description}"
"""


_AMPERE = _Gpu("NVIDIA A100-SXM4-80GB", 8, 1.41)
_H100 = _Gpu("NVIDIA H100 80GB HBM3", 9, 1.98, num_cores=132, units=128, l2=50 << 20, shared=232448)
_H200 = replace(_H100, description="NVIDIA H200")

CHIPS = {
    chip.name: chip
    for chip in (
        # A host of TPUs sends 25 GB/s into the network of the data centre.
        Chip("v5e", "tpu", 16e9, 8.1e11, 1.97e14, 1e11, 2.5e10 / 4, 4, 2, 16, (16, 16)),
        Chip("v6e", "tpu", 32e9, 1.6e12, 9.20e14, 2e11, 2.5e10 / 4, 4, 2, 16, (16, 16)),
        Chip("v5p", "tpu", 96e9, 2.8e12, 4.59e14, 2e11, 2.5e10 / 4, 4, 3, 4, (16, 20, 28)),
        # NVLink in one direction, and one network card per GPU (HDR for A100, NDR for the others).
        Chip("a100", "cuda", 80e9, 2.039e12, 3.12e14, 3e11, 2.5e10, 8, target=_AMPERE.text(80e9, 2.039e12)),
        Chip("h100", "cuda", 80e9, 3.35e12, 9.89e14, 4.5e11, 5e10, 8, target=_H100.text(80e9, 3.35e12)),
        Chip("h200", "cuda", 141e9, 4.8e12, 9.89e14, 4.5e11, 5e10, 8, target=_H200.text(141e9, 4.8e12)),
    )
}

LATENCY_S = {"tpu": 1e-6, "cuda": 5e-6}
"""Time in seconds that a message needs besides its bytes, per hop of a torus or per message of an all-reduce."""
