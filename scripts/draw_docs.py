"""Draws the pictures of the concept pages as SVG, into docs/images or the folder that is named."""

from __future__ import annotations

import sys
from pathlib import Path

IMAGES = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "images"
BLUE, GREEN, ORANGE, GREY, WHITE = "#dbeafe", "#d1fae5", "#ffedd5", "#f1f5f9", "#ffffff"


class Drawing:
    """Boxes, texts and arrows at pixel positions, on a white sheet that is readable on dark pages too."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts = [f'<rect width="{width}" height="{height}" rx="8" fill="{WHITE}"/>']

    def text(self, x: float, y: float, words: str, size: int = 14, anchor: str = "start", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{words}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, words: str = "", fill: str = GREY, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="#475569"{dash}/>'
        )
        lines = words.split("\n") if words else []
        for line, content in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + 17 * (line - (len(lines) - 1) / 2), content, 13, "middle")

    def arrow(self, *points: tuple[float, float], words: str = "", dashed: bool = False) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="#475569" stroke-width="1.5" marker-end="url(#tip)"{dash}/>'
        )
        if words:
            (x0, y0), (x1, y1) = points[0], points[-1]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 6, words, 12, "middle")

    def write(self, name: str, about: str) -> None:
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        tip += '<path d="M0,0 L8,4 L0,8 z" fill="#475569"/></marker>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'font-family="sans-serif" fill="#0f172a" role="img"><title>{about}</title><defs>{tip}</defs>'
        )
        (IMAGES / f"{name}.svg").write_text("\n".join([head, *self.parts, "</svg>"]) + "\n")


def block_tables() -> None:
    drawing = Drawing(760, 330)
    drawing.text(20, 30, "block tables: a sequence's positions to blocks", bold=True)
    drawing.text(470, 30, "frames: places in the pool", bold=True)
    tables = {"answer 1": (60, ["A", "B", "C"]), "answer 2": (180, ["A", "B", "C′"])}
    for name, (y, blocks) in tables.items():
        drawing.text(20, y + 22, name)
        for row, block in enumerate(blocks):
            drawing.text(105, y + 22 + 36 * row, f"{16 * row}–{16 * row + 15}", 12)
            fill = {"C": GREEN, "C′": ORANGE}.get(block, BLUE)
            drawing.box(165, y + 36 * row, 90, 30, f"block {block}", fill)
    frames = ["free", "free", "block A", "block B", "block C", "free", "cached D", "block C′"]
    fills = {"block A": BLUE, "block B": BLUE, "block C": GREEN, "block C′": ORANGE, "cached D": GREY}
    places = {}
    for number, content in enumerate(frames):
        y = 50 + 32 * number
        drawing.text(535, y + 18, str(number), 12, "end")
        drawing.box(545, y, 110, 27, content, fills.get(content, WHITE), dashed=content == "free")
        places[content.removeprefix("block ")] = y + 13
    for y, blocks in tables.values():
        for row, block in enumerate(blocks):
            drawing.arrow((255, y + 15 + 36 * row), (515, places[block]))
    drawing.text(20, 318, "Both answers share blocks A and B. C was copied when the second answer wrote to it.", 13)
    drawing.write("block_tables", "Two block tables that share two blocks, and the frames in which the blocks lie")


def tiers() -> None:
    drawing = Drawing(760, 300)
    drawing.box(250, 20, 260, 70, "KV pool\nactive and cached blocks", BLUE)
    drawing.box(60, 200, 250, 70, "host memory\nstore of blocks by digest", GREEN)
    drawing.box(450, 200, 250, 70, "disk\nstore that outlives the process", ORANGE)
    drawing.arrow((290, 90), (170, 200))
    drawing.text(150, 140, "evicted: saved", 12, "end")
    drawing.arrow((220, 200), (340, 90))
    drawing.text(292, 165, "wanted again: loaded", 12)
    drawing.arrow((310, 225), (450, 225), words="least recently used")
    drawing.arrow((570, 200), (460, 90))
    drawing.text(530, 140, "wanted again: loaded", 12)
    drawing.text(540, 50, "attention reads here,", 12)
    drawing.text(540, 66, "and blocks of long contexts", 12)
    drawing.text(540, 82, "where they are streamed from", 12)
    drawing.write("tiers", "The KV pool, host memory and disk, and how blocks move between them")


def request() -> None:
    drawing = Drawing(760, 520)
    for place, words in enumerate(("your script", "command line", "HTTP server")):
        drawing.box(90 + 205 * place, 15, 170, 34, words, WHITE)
        drawing.arrow((175 + 205 * place, 49), (175 + 205 * place, 80))
    drawing.box(
        60, 80, 640, 66, "front end: LLM, AsyncLLM, sessions, pins\ntext becomes token ids, token ids become text", BLUE
    )
    drawing.arrow((250, 146), (250, 210))
    drawing.text(240, 183, "requests, questions", 12, "end")
    drawing.arrow((510, 210), (510, 146))
    drawing.text(520, 183, "new tokens, answers", 12)
    drawing.text(380, 183, "EngineClient", 13, "middle", bold=True)
    drawing.box(60, 210, 640, 50, "engine core: one loop in one thread: schedule, submit, collect, commit", GREEN)
    drawing.arrow((190, 260), (190, 320))
    drawing.text(180, 295, "now, tokens", 12, "end")
    drawing.arrow((250, 320), (250, 260))
    drawing.text(260, 295, "StepPlan", 12)
    drawing.arrow((490, 260), (490, 320))
    drawing.text(480, 295, "StepPlan", 12, "end")
    drawing.arrow((580, 320), (580, 260))
    drawing.text(590, 295, "StepResult", 12)
    drawing.text(535, 282, "Executor", 13, "middle", bold=True)
    drawing.box(60, 320, 300, 60, "scheduling\nwhich tokens of which sequences", GREEN)
    drawing.box(400, 320, 300, 60, "executor: CPU, or torch\nrows, model, attention, pool, sampling", ORANGE)
    drawing.arrow((190, 380), (190, 440))
    drawing.text(200, 415, "MemoryManager", 13, bold=True)
    drawing.arrow((520, 440), (520, 380))
    drawing.arrow((560, 380), (560, 440))
    drawing.text(570, 415, "contents of evicted blocks", 12)
    drawing.box(60, 440, 300, 60, "memory\nwhich blocks they use, and in which frames", BLUE)
    drawing.box(400, 440, 300, 60, "offload stores\nhost memory, disk", GREY)
    drawing.write("request", "A request's way through front end, engine core, scheduling, memory and executor")


if __name__ == "__main__":
    block_tables()
    tiers()
    request()
