// What changed from one text to another, word by word.

// A word with the space behind it. Scripts without spaces have a word for each character.
const WORD = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]\s*|(?:(?![\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}])[\p{L}\p{M}\p{N}_])+\s*|\s+|\S\s*/gu;
// Texts that share less than this are told whole, one after the other.
const LEAST_SHARED = 0.2;
// Longer middles are not compared word by word: most pairs of words.
const MOST_PAIRS = 4e6;

// Return [["", text], ["del", text], ["ins", text]…]: parts of both texts, parts of the earlier one, and parts of the later one.
export function changesOf(earlier, later) {
  const [before, after] = [earlier, later].map((text) => text.match(WORD) ?? []), [a, b] = [before, after].map((list) => list.map((word) => word.trim()));
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const n = a.length - end - start, m = b.length - end - start, width = m + 1, isCompared = n * m <= MOST_PAIRS;
  // longest[i * width + j]: the most words that a from i on and b from j on share, in order.
  const longest = new Uint16Array(isCompared ? (n + 1) * width : 1);
  for (let i = isCompared ? n - 1 : -1; i >= 0; i -= 1) {
    for (let j = m - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[start + i] === b[start + j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const parts = [], add = (kind, text) => (parts.at(-1)?.[0] === kind ? (parts.at(-1)[1] += text) : parts.push([kind, text]));
  if (start + end + longest[0] < LEAST_SHARED * Math.max(a.length, b.length)) return [["del", earlier], ["ins", later]].filter(([, text]) => text);
  for (const word of after.slice(0, start)) add("", word);
  let i = 0, j = 0, gone = "", come = "";
  const flush = () => {
    if (gone) add("del", gone);
    if (come) add("ins", come);
    gone = come = "";
  };
  while (i < n || j < m) {
    if (i < n && j < m && a[start + i] === b[start + j]) {
      flush();
      add("", after[start + j]);
      [i, j] = [i + 1, j + 1];
    } else if (j === m || (i < n && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) gone += before[start + i++];
    else come += after[start + j++];
  }
  flush();
  for (const word of after.slice(b.length - end)) add("", word);
  return parts;
}
