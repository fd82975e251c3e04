"""Run by the supervisor in tests, as its coordinator."""

from tests.launcher.stand_in import coordinator

if __name__ == "__main__":
    coordinator()
