"""`python train.py recipe=alpaca_cn` is the same program as `bonsai-ft train recipe=alpaca_cn`."""

from bonsai_ft.cli import train

if __name__ == "__main__":
    train()
