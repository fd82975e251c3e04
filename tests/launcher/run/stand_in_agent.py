"""Run by the supervisor in tests, as its agent."""

from tests.launcher.run.stand_in import agent

if __name__ == "__main__":
    agent()
