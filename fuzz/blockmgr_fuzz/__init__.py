"""Property-based fuzzing of block managers: a reference model, shadow KV memory, and a Hypothesis state machine.

from blockmgr_fuzz import ManagerMachine
TestMyManager = ManagerMachine.TestCase
"""

from .machine import ManagerMachine
from .model import Model

__all__ = ["ManagerMachine", "Model"]
