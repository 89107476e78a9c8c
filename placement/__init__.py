"""WHERE stages run: bundles, shares of them, and whether the cluster can hold them. Knows no algorithm."""

from rollstream.placement.placement import Bundle, Demand, Placement, Plan, Seat
from rollstream.placement.preflight import check_cluster
from rollstream.placement.sharing import shared

__all__ = ["Bundle", "Demand", "Placement", "Plan", "Seat", "check_cluster", "shared"]
