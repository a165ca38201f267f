"""Program + headers -> Plan: what goes from which source box to which target box, with the proof that it covers."""

from mapper.plan.plan import Plan, PlannedTarget, Step

__all__ = ["Plan", "PlannedTarget", "Step"]
