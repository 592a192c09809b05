"""Makes a tree of text files like that of a large project. Arguments: the directory, and its size in MiB."""

import os
import random
import sys

root, total = sys.argv[1], int(sys.argv[2]) << 20
random.seed(7)
syllables = "ka ri to ne mu so la vi de pa gu fe lo mi ra te".split()
words = ["".join(random.choices(syllables, k=random.randint(1, 4))) for _ in range(4000)]


def line():
    indent = " " * random.choice([0, 4, 4, 8, 8, 12])
    return indent + " ".join(random.choices(words, k=random.randint(0, 12))) + random.choice(["", ";", " {", ")", ","])


# The files are slices of one text, because generating each file would take longer than the benchmark.
pool = "\n".join(line() for _ in range(150_000)).encode()
# (share of the files, smallest, largest size)
kinds = [(70, 200, 8 << 10), (25, 8 << 10, 64 << 10), (4.9, 64 << 10, 512 << 10), (0.1, 1 << 20, 4 << 20)]
weights = [kind[0] for kind in kinds]
needles = [b"needle_in_the_haystack", b"NEEDLE_in_the_HAYSTACK", b"REQUEST_2024_handle(event)"]

made = files = 0
while made < total:
    if files % 100 == 0:
        directory = f"{root}/{files // 2000:03}/{files // 100 % 20:02}"
        os.makedirs(directory)
    _, least, most = random.choices(kinds, weights)[0]
    size = random.randint(least, most)
    start = random.randrange(len(pool) - size)
    with open(f"{directory}/{random.choice(words)}_{files}.txt", "wb") as file:
        file.write(pool[start : start + size])
        if files % 500 == 0:
            file.write(b"\n" + needles[files // 500 % 3] + b"\n")
    made += size
    files += 1
print(f"{files} files, {made >> 20} MiB")
