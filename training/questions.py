"""Chat prompts to train a drafter on where no logs are at hand: questions of many kinds about many things, and tasks
about passages of texts that every Python installation has (documentation strings and licences).

`python -m training.questions prompts.jsonl --count 1000` writes a file for `--data`. The questions are this project's
own; prompts of benchmarks have no place here, for a drafter is to be measured on what it has not seen.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

PASSAGE = (200, 700)
"""Characters of a passage."""
TOPICS = """
bees;the moon landing;bread;volcanoes;chess;the Roman aqueducts;solar panels;sleep;coral reefs;
public libraries;bicycles;earthquakes;tea;glaciers;the printing press;whales;electric cars;haiku;vaccines;
the stock market;compost;jazz;black holes;rice farming;the Silk Road;photosynthesis;insurance;lighthouses;
migrating birds;probability;cheese;democracy;bridges;origami;the immune system;inflation;octopuses;
the Renaissance;recycling;marathon running;maps;wind power;mushrooms;the Great Wall of China;antibiotics;
city parks;language learning;the water cycle;robots;knitting;rainforests;taxes;telescopes;pottery;
steam engines;the human heart;gravity;deserts;opera;batteries;castles;nutrition;the internet;ants;
weather forecasts;the French Revolution;gardening on a balcony;DNA;swimming;clocks;plastic;wolves;calligraphy;
trains;the Olympic Games;honey;refrigerators;stars;coffee;ocean currents;dinosaurs;cameras;the Sahara;
music theory;elections;yoga;magnets;salt;airports;dreams;fermentation;mountain climbing;paper;the Vikings;
satellites;penguins;gold;friendship;cryptography;spices;tides;circus arts;school uniforms;remote work;
street food;old photographs;tropical fish;carpentry
""".replace("\n", "").split(";")
PLACES = """
Lisbon;Kyoto;Cape Town;Reykjavik;Cusco;Hanoi;Marrakesh;Montreal;Edinburgh;Jaipur;Athens;Buenos Aires;Prague;
Nairobi;Wellington;Vienna;Istanbul;Oslo;Havana;Seoul;Venice;Tallinn;Bogota;Krakow;Tunis;Vancouver;Seville;
Tbilisi
""".replace("\n", "").split(";")
ROLES = """
a ship's captain;a kindergarten teacher;a detective in 1920s London;a chef who loves spices;a museum guide;
a patient doctor;a football coach;a medieval blacksmith;an astronaut on a space station;a librarian;
a travel agent;a stand-up comedian;a bank clerk;a gardener;a retired judge;a radio host;a dragon;a tailor;
a mountain guide;a pirate
""".replace("\n", "").split(";")
NAMES = [
    "Amir",
    "Bella",
    "Carlos",
    "Dina",
    "Emil",
    "Fatou",
    "Goran",
    "Hana",
    "Ivo",
    "Jun",
    "Karin",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Pavel",
    "Rosa",
    "Sami",
    "Tara",
    "Yusuf",
]
THINGS = [
    "apples",
    "pencils",
    "tickets",
    "stamps",
    "marbles",
    "eggs",
    "books",
    "bottles",
    "cookies",
    "coins",
    "shells",
    "postcards",
    "oranges",
    "bricks",
]
SUBJECTS = """
the derivative of a function;Newton's second law;the periodic table;supply and demand;natural selection;
entropy;prime numbers;the Pythagorean theorem;acids and bases;electric current;plate tectonics;
the greenhouse effect;enzymes;the speed of light;matrix multiplication;the Doppler effect;binary numbers;
cell division;the law of large numbers;supernovae;osmosis;friction;radio waves;the carbon cycle;hash tables;
sound;semiconductors;viruses;the seasons;lenses
""".replace("\n", "").split(";")
PROGRAMS = """
reverses the words of a sentence;checks whether a string is a palindrome;computes the n-th Fibonacci number;
counts the vowels of a text;merges two sorted lists;finds the largest number in a list;
removes duplicates from a list;converts Celsius to Fahrenheit;computes the factorial of a number;
sorts a list of dictionaries by a key;reads a CSV file and prints each row;finds all prime numbers below n;
computes the average of a list;flattens a nested list;checks whether two words are anagrams;
rotates a list by k places;validates an e-mail address;draws a triangle of stars;
counts how often each word occurs in a text;finds the common elements of two lists;
computes the greatest common divisor;transposes a matrix;converts a number to Roman numerals;
generates a random password;implements a stack;implements a queue with two stacks;
searches a sorted list by bisection;parses a date;splits a list into chunks of size n;
computes the distance between two points;finds the longest word of a sentence;
writes a dictionary to a JSON file;caches the results of a function;measures how long a function takes;
replaces spaces with underscores;counts the set bits
""".replace("\n", "").split(";")
TRAITS = ["short", "clear", "friendly", "detailed", "simple", "formal", "funny", "convincing"]
SENTENCES = """
Der Zug fährt heute zehn Minuten später.;Ich möchte einen Tisch für vier Personen reservieren.;
Die Kinder spielen im Garten hinter dem Haus.;Wir haben gestern einen alten Freund getroffen.;
Können Sie mir bitte den Weg zum Bahnhof zeigen?;Das Wetter wird am Wochenende wieder besser.;
Meine Schwester arbeitet seit drei Jahren in einem Krankenhaus.;
Der Vertrag wurde von beiden Seiten unterschrieben.;Im Winter ist es in den Bergen sehr kalt.;
Die Regierung plant neue Schulen auf dem Land.;Er las das Buch in einer einzigen Nacht.;
Der Bäcker öffnet seinen Laden um sechs Uhr morgens.;Viele Menschen suchen in der Stadt eine Wohnung.;
Das Museum zeigt Bilder aus dem letzten Jahrhundert.;Sie hat das Fenster geöffnet, weil es zu warm war.;
Die Wissenschaftler haben eine neue Art entdeckt.
""".replace("\n", "").split(";")
Pick = random.Random


def _asked(kind: str, *forms: Callable[[Pick], str]) -> list[tuple[str, Callable[[Pick], str]]]:
    return [(kind, form) for form in forms]


def _topic(chance: Pick) -> str:
    return chance.choice(TOPICS)


def _sum(chance: Pick) -> str:
    name, other, thing = chance.choice(NAMES), chance.choice(NAMES), chance.choice(THINGS)
    a, b, c = chance.randint(12, 90), chance.randint(2, 11), chance.randint(2, 9)
    return chance.choice((
        f"{name} has {a} {thing} and gives {b} of them to {other}. Then {name} buys {c} boxes with {b} {thing} each. "
        f"How many {thing} does {name} have now?",
        f"A shop sells {thing} for {c} dollars each. {name} buys {b} of them with a voucher of {a + b * c} dollars. "
        "How much is left?",
        f"{name} reads {b} pages every day. How many days does it take to read a book of {b * a} pages?",
        f"A train travels {a} miles in {c} hours. How far does it travel in {b} hours at the same speed?",
        f"{name} is {c} years older than {other}. Together they are {2 * a + c} years old. How old is {name}?",
        f"A garden is {a} meters long and {b} meters wide. What are its area and its perimeter?",
        f"What is {b * 10}% of {a * 10}? Explain each step.",
    ))  # fmt: skip


TEMPLATES = [
    *_asked(
        "writing",
        lambda c: f"Write a {c.choice(TRAITS)} blog post about {_topic(c)}.",
        lambda c: f"Write a {c.choice(TRAITS)} email to {c.choice(NAMES)} about a meeting on {_topic(c)}.",
        lambda c: f"Write a short story about {c.choice(ROLES)} who discovers {_topic(c)}.",
        lambda c: f"Write a poem about {_topic(c)}.",
        lambda c: f"Give me five ideas for a speech about {_topic(c)}.",
        lambda c: f"Describe a walk through {c.choice(PLACES)} on a rainy morning.",
        lambda c: f"Write a product description for a book about {_topic(c)}.",
    ),
    *_asked(
        "roleplay",
        lambda c: f"Pretend you are {c.choice(ROLES)}. Explain {_topic(c)} to a visitor.",
        lambda c: f"You are {c.choice(ROLES)}. How do you spend your day, and what do you think of {_topic(c)}?",
        lambda c: f"Act as {c.choice(ROLES)} and answer: why should I visit {c.choice(PLACES)}?",
    ),
    *_asked(
        "reasoning",
        lambda c: f"Which is more useful in daily life, knowledge of {_topic(c)} or of {_topic(c)}? Give reasons.",
        lambda c: f"What would happen if there were no more {_topic(c)}?",
        lambda c: f"{c.choice(NAMES)} is taller than {c.choice(NAMES)}, and {c.choice(NAMES)} is shorter than both. "
        "Who is the tallest? Explain.",
        lambda c: f"What are the advantages and disadvantages of {_topic(c)}?",
        lambda c: f"Compare {_topic(c)} with {_topic(c)}.",
    ),
    *_asked("math", _sum, _sum, _sum, lambda c: f"Explain {c.choice(SUBJECTS)} with an example."),
    *_asked(
        "coding",
        lambda c: f"Write a Python function that {c.choice(PROGRAMS)}.",
        lambda c: f"Write a Python program that {c.choice(PROGRAMS)}, and explain it.",
        lambda c: f"Write a JavaScript function that {c.choice(PROGRAMS)}.",
        lambda c: f"How would you test a function that {c.choice(PROGRAMS)}?",
    ),
    *_asked(
        "knowledge",
        lambda c: f"Explain {c.choice(SUBJECTS)} to a beginner.",
        lambda c: f"What is the history of {_topic(c)}?",
        lambda c: f"Why are {_topic(c)} important?",
        lambda c: f"Give me a step by step guide to learn about {_topic(c)}.",
        lambda c: f"What are three common mistakes people make with {_topic(c)}?",
        lambda c: f"Plan a weekend in {c.choice(PLACES)} for someone who loves {_topic(c)}.",
    ),
    *_asked(
        "qa",
        lambda c: f"where does the word for {_topic(c)} come from",
        lambda c: f"who first wrote about {_topic(c)}",
        lambda c: f"when did people start to use {_topic(c)}",
        lambda c: f"what is {c.choice(SUBJECTS)}",
        lambda c: f"what is {c.choice(PLACES)} famous for",
    ),
    *_asked(
        "translation",
        lambda c: f"Translate German to English: {c.choice(SENTENCES)}",
        lambda c: f"Translate to French: I would like to read a book about {_topic(c)}.",
        lambda c: f"Translate German to English: {c.choice(SENTENCES)} {c.choice(SENTENCES)}",
    ),
]  # fmt: skip
ABOUT_PASSAGES = [
    ("summarization", "Summarize: {0}"),
    ("summarization", "Summarize the following text in two sentences.\n\n{0}"),
    ("rag", "Answer the question with the passages below.\n\n[1] {0}\n\n[2] {1}\n\nQuestion: What does the first do?"),
    ("rag", "{0}\n\nWhat is this text about? Quote the most important part."),
    ("extraction", "Extract the key terms from this text as a JSON list.\n\n{0}"),
    ("extraction", "Rewrite this text so that a child understands it.\n\n{0}"),
]
SHARE_OF_PASSAGES = 0.25


def questions(count: int, seed: int, passages: list[str]) -> Iterator[tuple[str, str]]:
    """`count` different prompts as (workload, text); about passages where there are some."""
    chance, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        if passages and chance.random() < SHARE_OF_PASSAGES:
            kind, form = chance.choice(ABOUT_PASSAGES)
            text = form.format(chance.choice(passages), chance.choice(passages))
        else:
            kind, make = chance.choice(TEMPLATES)
            text = make(chance)
        if text not in seen:
            seen.add(text)
            yield kind, text


def read_passages(folder: Path) -> list[str]:
    """Paragraphs of the documentation strings of a folder's Python files, in the order of their paths."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.py")):
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for part in (ast.get_docstring(node) or "").split("\n\n"):
                    plain = " ".join(textwrap.dedent(part).split())
                    if PASSAGE[0] <= len(plain) <= PASSAGE[1] and ">>>" not in plain:
                        found[plain] = None
    return list(found)


def main(
    out: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 17,
    folder: Annotated[
        Path | None, typer.Option(help="Folder whose documentation strings are passages; default: standard library.")
    ] = None,
) -> None:
    """Write chat prompts of many kinds to train a drafter on."""
    passages = read_passages(folder or Path(sysconfig.get_path("stdlib")))
    with out.open("w", encoding="utf-8") as file:
        for workload, text in questions(count, seed, passages):
            line = {"messages": [{"role": "user", "content": text}], "workload": workload}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
