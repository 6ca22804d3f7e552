"""State machines for what `ManagerMachine` does not look at; the mutation score runs them beside it."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine

MACHINES: tuple[type[RuleBasedStateMachine], ...] = ()
