"""Run by the supervisor in tests, as its coordinator."""

from tests.launcher.run.stand_in import coordinator

if __name__ == "__main__":
    coordinator()
