"""Run by the supervisor in tests, as its agent."""

from tests.launcher.stand_in import agent

if __name__ == "__main__":
    agent()
