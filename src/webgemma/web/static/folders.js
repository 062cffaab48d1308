// Folders that are dropped on the page: all files in them, without those that are hidden or that programs fill.

const GENERATED = ["node_modules", "__pycache__"];
const MAX_FILES = 20_000;

const isLeftOut = ({ name }) => name.startsWith(".") || GENERATED.includes(name);

/** Return, for each file of a drop, the folder that it is, or null; to be called before its event ends. */
export const droppedFolders = ({ items }) => [...items].filter(({ kind }) => kind === "file").map((item) => {
  const entry = item.webkitGetAsEntry?.();
  return entry?.isDirectory ? entry : null;
});

/** Whether a file that was chosen with its folder is worth reading. */
export const isShown = ({ webkitRelativePath: path }) => !path.split("/").some((name) => isLeftOut({ name }));

const promised = (start) => new Promise((resolve, reject) => start(resolve, reject));

/** Return some files, and all in these folders: each has its path in `path`. What cannot be read is left out. */
export async function filesIn(folders, files = []) {
  const found = files.map((file) => Object.assign(file, { path: file.webkitRelativePath || file.name }));
  const waiting = [...folders];
  while (waiting.length && found.length < MAX_FILES) {
    const folder = waiting.pop();
    const reader = folder.createReader();
    for (;;) { // it lists some entries at a time
      const entries = await promised((resolve, reject) => reader.readEntries(resolve, reject)).catch(() => []);
      if (!entries.length) break;
      for (const entry of entries.filter((each) => !isLeftOut(each))) {
        if (entry.isDirectory) waiting.push(entry);
        else {
          const file = await promised((resolve, reject) => entry.file(resolve, reject)).catch(() => null);
          if (file) found.push(Object.assign(file, { path: entry.fullPath.replace(/^\//, "") }));
        }
      }
    }
  }
  return found.slice(0, MAX_FILES);
}
