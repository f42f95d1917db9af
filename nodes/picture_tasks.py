"""Ready questions about a picture. Names are only ever appended."""

from __future__ import annotations

OWN = "my question"
# Prompts for image models differ: some read prose, some read tags.
TASKS = {
    OWN: "",
    "caption": (
        "Describe this picture in one paragraph of plain prose: subject, setting, colours, light and composition. "
        "Say only what can be seen."
    ),
    "tags": (
        "List what can be seen in this picture as short tags in lower case, separated by commas, the most important"
        " first. Write the tags alone."
    ),
    "JSON": (
        'Describe this picture as one JSON object with the keys "subject", "setting", "colors" (a list), "light", '
        '"composition", "style" and "text" (what is written in it, or ""). Write the JSON alone.'
    ),
    "prompt for Flux or Qwen-Image": (
        "Write a prompt with which an image model that reads natural language draws this picture "
        "again: one paragraph on subject, setting, materials, colours, light, camera and style. Write the prompt alone."
    ),
    "prompt for SDXL": (
        "Write a prompt with which SDXL draws this picture again: at most 60 words, short phrases separated by "
        "commas, subject first, then setting, style, light and camera. Write the prompt alone."
    ),
    "prompt for tag models": (
        "Write a prompt with which an image model that reads booru tags draws this picture again: tags in "
        "lower case with underscores, separated by commas, at most 40 of them. Write the tags alone."
    ),
    "read the text": (
        "Write down all text in this picture, word for word, in reading order, one line per line. "
        "Write nothing else; if there is none, write: no text."
    ),
    "compare": (
        "Compare these pictures: what is the same, what differs, and which is sharper and freer of flaws. Name the"
        " first one picture 1."
    ),
}


def question_of(task: str, question: str) -> str:
    """The ready question, then the user's own. Raises KeyError for an unknown task."""
    return "\n\n".join(part for part in (TASKS[task], question.strip()) if part)
