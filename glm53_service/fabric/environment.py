"""The communication environment of one rank, from one place, so that no two libraries choose different
links.
"""

from __future__ import annotations

from glm53_service.fabric.rails import Fabric


def rank_environment(fabric: Fabric, *, rdma: bool) -> dict[str, str]:
    """Return the variables that bind gloo, NCCL, UCX and vLLM to the rails found on this node.

    Without `rdma` only the socket interface is set. A variable without a value is left out: NCCL reads an
    empty GID index as 0.
    """
    first = fabric.rails[0]
    environment = {
        "VLLM_HOST_IP": first.address,
        "GLOO_SOCKET_IFNAME": first.netdev,
        "TP_SOCKET_IFNAME": first.netdev,
    }
    if rdma:
        hcas = [rail.hca for rail in fabric.rails if rail.hca]
        environment |= {
            "NCCL_SOCKET_IFNAME": first.netdev,
            "UCX_NET_DEVICES": first.netdev,
            "NCCL_IB_HCA": "=" + ",".join(hcas),
            "NCCL_IB_GID_INDEX": str(first.gid_index),
            "NCCL_DEBUG": "INFO",  # a few lines a start, which say whether RDMA is used at all
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
        }
    return environment
