// Two texts word by word: which words stand in both of them, in the same order.

const LONGEST = 4000; // words; the table of two such texts has 16 million places

const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// For each word of two lists whether it has a partner, by the longest common subsequence.
function common(left, right) {
  const kept = [new Array(left.length).fill(false), new Array(right.length).fill(false)];
  let begin = 0, ends = [left.length, right.length];
  while (begin < Math.min(...ends) && left[begin] === right[begin]) kept[0][begin] = kept[1][begin++] = true;
  while (Math.min(...ends) > begin && left[ends[0] - 1] === right[ends[1] - 1]) {
    ends = ends.map((end) => end - 1);
    kept[0][ends[0]] = kept[1][ends[1]] = true;
  }
  const [height, width] = ends.map((end) => end - begin);
  if (height > LONGEST || width > LONGEST) return kept;
  const row = width + 1, longest = new Uint16Array((height + 1) * row);
  for (let i = height - 1; i >= 0; i--) {
    for (let j = width - 1; j >= 0; j--) {
      longest[i * row + j] = left[begin + i] === right[begin + j] ? longest[(i + 1) * row + j + 1] + 1
        : Math.max(longest[(i + 1) * row + j], longest[i * row + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < height && j < width;) {
    if (left[begin + i] === right[begin + j]) kept[0][begin + i++] = kept[1][begin + j++] = true;
    else if (longest[(i + 1) * row + j] >= longest[i * row + j + 1]) i++;
    else j++;
  }
  return kept;
}

// A text in pieces, [text, whether it is in the other one, too]; space between two differences belongs to them.
function pieces(list, kept) {
  const found = [];
  list.forEach((word, i) => {
    const same = /^\s+$/.test(word) ? (kept[i - 1] ?? true) || (kept[i + 1] ?? true) : kept[i];
    if (found.at(-1)?.[1] === same) found.at(-1)[0] += word;
    else found.push([word, same]);
  });
  return found;
}

// The pieces of both, and the part of their words that stands in both, 0 to 1.
export function compare(left, right) {
  const [a, b] = [words(left), words(right)];
  const kept = common(a, b);
  const count = (list, is) => list.filter((word, i) => !/^\s+$/.test(word) && is[i]).length;
  const all = count(a, a.map(() => true)) + count(b, b.map(() => true));
  return { left: pieces(a, kept[0]), right: pieces(b, kept[1]), same: all ? (count(a, kept[0]) + count(b, kept[1])) / all : 1 };
}
