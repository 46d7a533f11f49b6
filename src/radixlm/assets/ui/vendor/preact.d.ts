export const h: any;
export const html: any;
export const render: any;
export const createContext: any;
export const createElement: any;
export const useState: any;
export const useReducer: any;
export const useEffect: any;
export const useLayoutEffect: any;
export const useRef: any;
export const useImperativeHandle: any;
export const useMemo: any;
export const useCallback: any;
export const useContext: any;
export const useDebugValue: any;
export const useErrorBoundary: any;
export class Component {
  constructor(props?: any);
  props: any;
  state: any;
  setState(state: any): void;
  forceUpdate(): void;
}
