"""Short Chinese instructions: knowledge, idioms, small poems, arithmetic in words, everyday tasks.

The bundled rows (recipes/data/alpaca_cn.jsonl, 620 of them, Apache-2.0) were written for this
project. Rows in Alpaca's columns (instruction, input, output) from any other file work as well:
data.path=FILE. What to expect from the bundled rows is in the README, measured.
"""

DATASET = "data/alpaca_cn.jsonl"

PROBES = [
    "你是谁？",
    "请解释成语“画龙点睛”的意思。",
    "写一首关于春雨的短诗。",
    "小明有12个苹果，送给小红5个，还剩几个？",
]


def conversation(row: dict) -> list[dict] | str:
    """An Alpaca row as one turn each; a string says why a row is left out."""
    instruction = (row.get("instruction") or "").strip()
    output = (row.get("output") or "").strip()
    if not instruction:
        return "empty instruction"
    if not output:
        return "empty output"
    context = (row.get("input") or "").strip()
    question = f"{instruction}\n{context}" if context else instruction
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    system = (row.get("system") or "").strip()
    return [{"role": "system", "content": system}, *messages] if system else messages
